"""Traps of this layout, each of which has bitten somebody."""

import operator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_operator_is_the_standard_librarys() -> None:
    assert operator.add(1, 2) == 3
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_tests_are_no_packages() -> None:
    assert not [
        *ROOT.glob("tests/**/__init__.py"),
        *ROOT.glob("e2e/**/__init__.py"),
        *ROOT.glob("testing/tests/**/__init__.py"),
    ]


@pytest.mark.parametrize(
    "package",
    [
        "core/dualmap",
        "edge/dualmap_edge",
        "operator/dualmap_operator",
        "extproc/dualmap_extproc",
        "sim/dualmap_sim",
        "cli/dualmap_cli",
    ],
)
def test_packages_are_typed_and_modules_can_be_read(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / package).rglob("*.py")
        if not path.name.endswith("_pb2.py") and (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long, "a file no reader must scroll to understand has at most 400 lines"
