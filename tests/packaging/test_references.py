"""Tests that generated pages match their sources."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_crd_reference_matches_the_schema() -> None:
    made = module_at(ROOT / "crds" / "reference.py")
    assert made.FILE.read_text() == made.page(), "run: python crds/reference.py"


def test_crd_reference_describes_every_field() -> None:
    rows = [line for line in (ROOT / "docs" / "crd.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if not row.rsplit(" | ", 1)[1].strip(" |")] == []
