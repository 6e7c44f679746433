"""Tests of the repository's layout."""

import operator
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "core/dualmap",
    "edge/dualmap_edge",
    "operator/dualmap_operator",
    "extproc/dualmap_extproc",
    "sim/dualmap_sim",
    "sidecar/dualmap_sidecar",
    "cli/dualmap_cli",
]
LONG_LINES = 600


def warn_of_long_files(folder: Path) -> None:
    """Warn about each module with more than ``LONG_LINES`` lines, except generated modules."""
    for path in sorted(folder.rglob("*.py")):
        lines = len(path.read_text().splitlines())
        if lines > LONG_LINES and not path.name.endswith("_pb2.py"):
            warnings.warn(f"{path} has {lines} lines: split it if it holds two subjects", stacklevel=2)


def test_operator_import_gives_the_standard_library_module() -> None:
    assert operator.add(1, 2) == 3
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_test_folders_contain_no_init_files() -> None:
    assert not [
        *ROOT.glob("tests/**/__init__.py"),
        *ROOT.glob("e2e/**/__init__.py"),
        *ROOT.glob("testing/tests/**/__init__.py"),
    ]


# In other tests a warning is an error (pyproject.toml). For this test, pytest only shows the warning at the end of the
# run.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_long_files_cause_a_warning(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    warn_of_long_files(ROOT / package)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_in_the_wheel_and_in_the_image(package: str) -> None:
    given = (ROOT / ".dockerignore").read_text().splitlines()
    assert f"!{package.split('/')[0]}" in given
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_file_of_more_than_600_lines_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("\n" * LONG_LINES)
    (tmp_path / "made_pb2.py").write_text("\n" * 1000)
    warn_of_long_files(tmp_path)
    (tmp_path / "long.py").write_text("\n" * (LONG_LINES + 1))
    with pytest.warns(UserWarning, match=r"long\.py has 601 lines"):
        warn_of_long_files(tmp_path)
