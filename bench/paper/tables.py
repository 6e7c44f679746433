"""Markdown tables of measured figures: means over windows with their spread, and a dash for a missing value."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of one figure in several windows. Missing values are left out."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        """Return the spread of the values that are not None."""
        return cls(tuple(each for each in values if each is not None))

    @property
    def mean(self) -> float | None:
        """The mean of the values, None without values."""
        return fmean(self.values) if self.values else None

    def show(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return the mean, with the lowest and the highest value if there are several values."""
        if self.mean is None:
            return "-"
        shown = f"{self.mean * scale:.{digits}f}"
        if len(self.values) == 1:
            return shown
        return f"{shown} ({min(self.values) * scale:.{digits}f}-{max(self.values) * scale:.{digits}f})"


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return one figure as text, or a dash for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def ratio(part: float | None, whole: float | None, digits: int = 1) -> str:
    """Return a share in percent, or a dash if a value is missing."""
    return "-" if part is None or not whole else f"{100 * part / whole:.{digits}f} %"


def change(now: float | None, before: float | None, digits: int = 1) -> str:
    """Return the relative change in percent, or a dash if a value is missing."""
    return "-" if now is None or not before else f"{100 * (now / before - 1):+.{digits}f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Raises ValueError for a row with more or fewer values than heads."""
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"{len(row)} values under {len(heads)} heads: {list(row)} under {list(heads)}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"
