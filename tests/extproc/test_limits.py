"""Tests that docs/limits.md has the limits of the code, and an existing test for each limit."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.server import http2_limits

# The main port's limits, some of which follow from the router's settings.
HTTP2 = http2_limits(Limits())
ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (?!What|---)([^|]*) \| ([^|]*) \| ([^|]*)\| ([^|]*) \| `([^|]*)` \|$",
    (ROOT / "docs" / "limits.md").read_text(),
    re.MULTILINE,
)


def test_limits_page_rows_are_all_checked() -> None:
    lines = [line for line in (ROOT / "docs" / "limits.md").read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len([line for line in lines if not line.startswith("| What is limited")])


@pytest.mark.parametrize(("what", "limit", "beyond", "set_by", "test"), ROWS, ids=[row[0][:30] for row in ROWS])
def test_limits_page_row_matches_code_and_refers_to_a_test(
    what: str, limit: str, beyond: str, set_by: str, test: str
) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"def {name}\(", (ROOT / file).read_text())
    dotted = re.fullmatch(r"`([\w.]+)\.([A-Z]\w+)(?:\.(\w+))?`", set_by)
    if dotted:
        module, attribute, field = dotted.groups()
        value = getattr(import_module(module), attribute)
        if field:
            value = getattr(HTTP2 if value is Http2Limits else value(), field)
        assert value == float(limit.split()[0])
