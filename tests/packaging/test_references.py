"""Pages that are made from something else in the repository are what it makes."""

import importlib.util
import json
import re
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


def test_the_reference_of_the_crd_is_what_the_schema_makes() -> None:
    made = module_at(ROOT / "crds" / "reference.py")
    assert made.FILE.read_text() == made.page(), "run: python crds/reference.py"


def test_every_field_of_the_crd_is_described() -> None:
    rows = [line for line in (ROOT / "docs" / "crd.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if not row.rsplit(" | ", 1)[1].strip(" |")] == []


def test_the_grafana_dashboard_is_what_its_panels_make() -> None:
    made = module_at(ROOT / "helm" / "grafana.py")
    assert made.FILE.read_text() == made.text(), "run: python helm/grafana.py"


def test_every_query_of_the_dashboard_asks_for_what_is_exported() -> None:
    exported = set(re.findall(r"\| `(dualmap_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    recorded = json.loads((ROOT / "tests" / "chart" / "recorded" / "series.json").read_text())["series"]
    exported |= {series.partition("{")[0] for series in recorded if series.startswith("envoy_")}
    panels = json.loads((ROOT / "helm" / "dualmap" / "files" / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 20
    asked = {name.removesuffix("_bucket") for query in queries for name in re.findall(r"(?:dualmap|envoy)_\w+", query)}
    assert asked - exported == set()
