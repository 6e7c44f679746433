"""The helm command of versions 3 (PyPI) and 4 (built by `build.py`).

`test_helm.py` installs the chart with both versions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "dualmap"


class HelmError(AssertionError):
    """helm failed. The message has the command and its output."""


class Helm:
    """The helm command for one namespace, with separate configuration and cache folders."""

    def __init__(self, binary: Path, *, kubeconfig: Path, namespace: str, directory: Path) -> None:
        self._binary = binary
        self._namespace = namespace
        self._directory = directory
        folders = {f"HELM_{kind}_HOME": str(directory / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = {**os.environ, **folders, "KUBECONFIG": str(kubeconfig)}

    def __call__(self, *arguments: str | Path, timeout_s: float = 300.0) -> str:
        """Run a helm command in the namespace and return its stdout; raises `HelmError`."""
        command = [str(self._binary), *map(str, arguments), "--namespace", self._namespace]
        ran = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if ran.returncode != 0:
            said = f"{ran.stdout}{ran.stderr}"
            raise HelmError(f"helm {' '.join(map(str, arguments))} exited with {ran.returncode}:\n{said}")
        return ran.stdout

    def package(self, version: str) -> Path:
        """Package the chart with another version number and return the archive."""
        self("package", CHART, "--version", version, "--destination", self._directory)
        return self._directory / f"dualmap-{version}.tgz"

    def values(self, name: str, values: Mapping[str, Any]) -> Path:
        """Write a values file and return its path."""
        path = self._directory / f"{name}.json"
        path.write_text(json.dumps(values))
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The default images of the chart, and the image of the Dockerfile's target epp."""

    dualmap: str
    epp: str
    envoy: str
    redis: str


def references() -> References:
    """Read the images from the chart's values. The tag of DualMap's image is the chart's appVersion."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]

    def reference(image: Mapping[str, str]) -> str:
        return f"{image['registry']}/{image['repository']}:{image['tag'] or version}"

    return References(
        dualmap=reference(values["image"]),
        epp=reference({**values["image"], "repository": f"{values['image']['repository']}-epp"}),
        envoy=reference(values["gateway"]["bundled"]["image"]),
        redis=reference(values["redis"]["bundled"]["image"]),
    )


def binary(version: int, binaries: Path) -> Path | None:
    """Return the path of helm with this major version, or None if it is not installed."""
    if version == 4:
        return binaries / "helm" if (binaries / "helm").is_file() else None
    found = shutil.which("helm", path=str(Path(sys.executable).parent))
    return Path(found) if found else None
