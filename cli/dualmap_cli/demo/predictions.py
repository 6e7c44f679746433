"""What the routers predict of the engines' caches, and what they know from KV events.

Each response has a receipt with the predicted tokens, and its usage has the tokens that the engine had cached. The
routers' metrics pages have the states and counts of KV events.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_RECEIPT = re.compile(r"\bmatched=(\d+), prompt=(\d+)")
_FROM_EVENTS: Final = 'source="events"'
_STATE = re.compile(r'^dualmap_kv_event_state\{[^}]*state="(\w+)"[^}]*\} 1(?:\.0)?$', re.MULTILINE)
_BLOCKS = re.compile(r'^dualmap_kv_events_total\{[^}]*kind="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_GAPS = re.compile(r"^dualmap_kv_event_gaps_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The share of a prompt that the router expected in the cache, and whether it knew this from KV events."""

    cached_share: float
    from_events: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCounts:
    """The states of the engines' KV events and the blocks that they reported, as sums over the routers."""

    states: Mapping[str, int] = field(default_factory=dict)
    stored: int = 0
    removed: int = 0
    gaps: int = 0


def read_prediction(receipt: str) -> Prediction | None:
    """Return the prediction in the header ``x-dualmap-decision``, None if no router picked the member."""
    found = _RECEIPT.search(receipt)
    if found is None:
        return None
    return Prediction(cached_share=int(found[1]) / max(1, int(found[2])), from_events=_FROM_EVENTS in receipt)


def read_event_counts(pages: Sequence[str]) -> EventCounts:
    """Return the counts of the routers' metrics pages."""
    blocks: Counter[str] = Counter()
    for page in pages:
        for kind, number in _BLOCKS.findall(page):
            blocks[kind] += int(float(number))
    return EventCounts(
        states=dict(Counter(state for page in pages for state in _STATE.findall(page))),
        stored=blocks["stored"],
        removed=blocks["removed"],
        gaps=sum(int(float(number)) for page in pages for number in _GAPS.findall(page)),
    )
