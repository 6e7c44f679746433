"""Makes the table of docs/evaluation.md from the results: the papers' claims next to our measurements.

Each section defines its claims. ``write_claims`` writes all claims between two comments of the page, so the page's
figures always match the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BEGIN: Final = "<!-- claims: made by python -m bench paper -->\n"
_END: Final = "<!-- end of claims -->\n"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a source, its location in the source, and our measurement, or an empty text."""

    source: str
    says: str
    measured: str


def write_claims(page: Path, claims: Sequence[Claim]) -> None:
    """Replace the claims in a page; a page without the comments stays unchanged."""
    text = page.read_text() if page.exists() else ""
    if _BEGIN not in text or _END not in text:
        return
    before, rest = text.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    rows = "".join(f"| {each.source} | {each.says} | {each.measured or 'not measured'} |\n" for each in claims)
    page.write_text(f"{before}{_BEGIN}| where | what it says | what we measure |\n|---|---|---|\n{rows}{_END}{after}")
