"""Tests that the emulated cluster does not import the product, and that its packages import only lower packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "emulated_cluster"
# Maps each package to the other packages that it may import.
PACKAGES = {
    "waiting": (),
    "loop_thread": (),
    "api": (),
    "control_plane": ("api",),
    "kubelet.pod_spec": ("api",),
    "kubelet.isolation": ("kubelet.pod_spec",),
    "kubelet.containers": ("api", "kubelet.pod_spec", "kubelet.isolation"),
    "kubelet": ("api", "control_plane", "loop_thread", "kubelet.pod_spec", "kubelet.isolation", "kubelet.containers"),
    "services": ("api", "control_plane", "loop_thread"),
    "fixtures": ("control_plane", "kubelet"),
}
PRODUCT = ("dualmap", "controlplane", "harness")
# The exception is the product's list-watch loop, which the operator and the router also use.
LOOP = ("api/follow.py", "dualmap_edge.kube.")


def imports_of(source: str) -> Iterator[str]:
    """Yield the full names that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)


def package_of(name: str) -> str:
    """Return the subpackage of a module's dotted name."""
    parts = name.split(".")
    deepest = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(each for each in deepest if each in PACKAGES)


def violations(path: Path, source: str) -> list[str]:
    """Return the imports of a module that its package does not allow."""
    package = package_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    found = []
    for name in imports_of(source):
        if name.startswith("emulated_cluster."):
            other = package_of(name.removeprefix("emulated_cluster."))
            if other not in (package, *PACKAGES[package]):
                found.append(name)
        elif name.startswith(PRODUCT) and not (path == PACKAGE / LOOP[0] and name.startswith(LOOP[1])):
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_package_allows(path: Path) -> None:
    if path != PACKAGE / "__init__.py":
        assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("kubelet/agent.py", "from dualmap_edge.kube.client import KubeClient"),
        ("services/services.py", "import dualmap.router"),
        ("api/follow.py", "import dualmap.router"),
        ("control_plane/cluster.py", "from emulated_cluster.kubelet import agent"),
        ("kubelet/isolation/roots.py", "from emulated_cluster.kubelet.containers import probes"),
        ("api/client.py", "from emulated_cluster.control_plane import kubeconfigs"),
    ],
)
def test_import_check_finds_a_forbidden_import(module: str, planted: str) -> None:
    path = PACKAGE / module
    assert len(violations(path, f"{path.read_text()}\n{planted}\n")) == 1
