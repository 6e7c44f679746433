"""Writes the measured parts of docs/evaluation.md: the papers' claims next to our measurements, and other tables.

Each section defines its claims and its excerpts. ``write_parts`` writes each of them between two comments of the page,
so the page's figures always match the results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a source, its location in the source, and our measurement, or an empty text."""

    source: str
    says: str
    measured: str


def claims_table(claims: Sequence[Claim]) -> str:
    """Return the table of all claims."""
    rows = "".join(f"| {each.source} | {each.says} | {each.measured or 'not measured'} |\n" for each in claims)
    return f"| where | what it says | what we measure |\n|---|---|---|\n{rows}"


def write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Replace the parts of a page, by name. A part whose comments the page lacks is left out."""
    if not page.exists():
        return
    text = page.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name}: made by python -m bench paper -->\n", f"<!-- end of {name} -->\n"
        if begin in text and end in text:
            before, rest = text.split(begin, 1)
            text = f"{before}{begin}{part}{end}{rest.split(end, 1)[1]}"
    page.write_text(text)
