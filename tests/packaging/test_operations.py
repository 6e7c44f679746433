"""Tests that docs/operations.md has a test for every fault, and a row for every tested fault."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "operations.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_operations_page_fault_rows_name_existing_tests() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "---" not in line]
    faults = [row for row in rows if len(row.split("|")) == 7 and not row.startswith("| Fault |")]
    assert len(faults) >= 20
    for row in faults:
        named = re.findall(r"`(\w+)::(\w+)`", row.split("|")[5])
        assert named, f"no test: {row}"
        for module, test in named:
            found = [*ROOT.glob(f"e2e/{module}.py"), *ROOT.glob(f"tests/*/{module}.py")]
            assert found, f"{module} is no test module"
            assert any(test in functions_of(path) for path in found), f"{module} has no {test}"


def test_operations_page_has_a_row_for_every_tested_fault() -> None:
    played = {test for path in ROOT.glob("e2e/test_faults_*.py") for test in functions_of(path)}
    assert played
    assert played - set(re.findall(r"::(test_\w+)`", TABLE)) == set()


def test_operations_page_names_existing_metrics() -> None:
    named = set(re.findall(r"\bdualmap_[a-z_]+", TABLE))
    assert named
    assert {name for name in named if name not in METRICS} == set()
