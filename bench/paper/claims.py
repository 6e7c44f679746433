"""Makes the table of docs/evaluation.md from the results: the papers' claims beside our measurements.

Each section states its own claims. ``write_claims`` writes them between two marks of the page, so its figures always
match the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BEGIN: Final = "<!-- claims: made by python -m bench paper -->\n"
_END: Final = "<!-- end of claims -->\n"


@dataclass(frozen=True, slots=True)
class Claim:
    """A source's claim and its place, and our measurement; empty where nothing was measured yet."""

    source: str
    says: str
    measured: str


def write_claims(page: Path, claims: Sequence[Claim]) -> None:
    """Replace the claims in a page; a page without the marks is left as it is."""
    text = page.read_text() if page.exists() else ""
    if _BEGIN not in text or _END not in text:
        return
    before, rest = text.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    rows = "".join(f"| {each.source} | {each.says} | {each.measured or 'not measured'} |\n" for each in claims)
    page.write_text(f"{before}{_BEGIN}| where | what it says | what we measure |\n|---|---|---|\n{rows}{_END}{after}")
