"""Finds samples in pages of the Prometheus text format by byte search.

A page of a real engine has 700 lines and 59 KB, of which a reader needs about ten lines. A parser of all lines takes
100 times as long as a search for these lines. The time of each function here is linear in the size of the page.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SAMPLES_MAX: Final = 512
"""The most samples of one metric that are read. An engine has one to three for each data-parallel rank."""
_LINES_MAX: Final = 2 * SAMPLES_MAX
_VALUE_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: the text between the braces, and the value, which is NaN if it is not a number."""

    text: bytes
    value: float

    def label(self, name: str) -> str:
        """Return a label's value, with its escapes; empty without this label or with more than 64 bytes."""
        # No text inside a value contains the start, because a quote inside a value follows a backslash.
        text, start = b"," + self.text, f',{name}="'.encode()
        at = text.find(start)
        if at < 0:
            return ""
        at += len(start)
        value, quote, _ = text[at : at + _VALUE_MAX + 1].partition(b'"')
        return value.decode(errors="replace") if quote else ""


_INVALID: Final = Sample(b"", math.nan)

Samples = Mapping[str, list[Sample]]
"""The samples of a page, by metric."""


class SampleFinder:
    """Finds the samples of the metrics ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._starts = {name: b"\n" + name.encode() for name in names}

    def find(self, page: bytes) -> Samples | None:
        """Return the first samples of each metric; None for a page without a final newline, which is incomplete."""
        if not page.endswith(b"\n"):
            return None
        lines = b"\n" + page
        return {name: found for name, start in self._starts.items() if (found := _samples(lines, start))}


def _samples(lines: bytes, start: bytes) -> list[Sample]:
    found: list[Sample] = []
    end = 0
    # Lines of metrics with a longer name count as well, so that any page has a bounded number of steps.
    for _ in range(_LINES_MAX):
        at = lines.find(start, end)
        if at < 0 or len(found) == SAMPLES_MAX:
            break
        end = at + len(start)
        if lines[end] in b" \t{":
            found.append(_sample(lines[end : lines.index(b"\n", end)]))
    return found


def _sample(line: bytes) -> Sample:
    """Read a line after the metric's name: labels in braces, a value, and an optional timestamp."""
    labels, brace, numbers = line.rpartition(b"}")
    text = labels.lstrip(b" \t")
    if brace and not (text.startswith(b"{") and _ends_quotes(text)):
        return _INVALID
    value, *timestamp = numbers.split(maxsplit=2) or [b""]
    if len(timestamp) > 1 or (timestamp and not timestamp[0].removeprefix(b"-").isdigit()):
        return _INVALID
    return Sample(text[1:], _number(value))


def _ends_quotes(text: bytes) -> bool:
    """Return whether each quote that begins a value has a quote that ends it."""
    plain = text.replace(rb"\\", b"")
    return (plain.count(b'"') - plain.count(rb"\"")) % 2 == 0


def total(samples: Iterable[Sample]) -> int | None:
    """Return the sum of samples that are counts, rounded up; None without a sample or for a sample that is no count."""
    values = [each.value for each in samples]
    if not values or not all(0 <= value < math.inf for value in values):
        return None
    summed = sum(values)
    return math.ceil(summed) if summed < math.inf else None


def _number(text: bytes) -> float:
    if len(text) > _VALUE_MAX:
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan
