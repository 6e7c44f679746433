"""Compares the router's number of prompt tokens with the engine's, for each class of requests.

A class is a model, an API, and whether the request has tools. Token ids that are wrong for one request of a class are
probably wrong for others as well: another template, another version of the tokenizer. The router therefore uses the
ids of a class only while nearly all recent counts are equal.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from dualmap.prompts.api import Api

WINDOW: Final = 100
"""The last requests of a class that count."""
MOST_MISMATCHES: Final = 1
"""The most different counts in a window; with more, the ids of the class are not used."""
CLASSES_MAX: Final = 1024
"""The most classes of a pool. Clients choose neither models nor APIs freely, so a pool has few."""


class TokenClass(NamedTuple):
    """Requests whose ids are right or wrong together."""

    model: str
    api: Api
    has_tools: bool


class Compared(NamedTuple):
    """The result of one comparison; ``changed`` is true if it changed whether the class is trusted."""

    equal: bool
    trusted: bool
    changed: bool


class TokenParity:
    """The recent comparisons of one pool."""

    def __init__(self) -> None:
        self._recent: OrderedDict[TokenClass, deque[bool]] = OrderedDict()

    def trusts(self, requests: TokenClass) -> bool:
        """Return whether the ids of a class may be used. A class without comparisons is trusted."""
        return _trusted(self._recent.get(requests, ()))

    def compare(self, requests: TokenClass, own: int, engines: int) -> Compared:
        """Add the number of prompt tokens of one request, as the router and the engine counted it."""
        recent = self._recent.get(requests)
        if recent is None:
            recent = self._recent[requests] = deque(maxlen=WINDOW)
            if len(self._recent) > CLASSES_MAX:
                self._recent.popitem(last=False)
        before = _trusted(recent)
        recent.append(own == engines)
        after = _trusted(recent)
        return Compared(equal=own == engines, trusted=after, changed=before != after)

    @property
    def distrusted(self) -> tuple[TokenClass, ...]:
        """The classes whose ids are not used."""
        return tuple(each for each, recent in self._recent.items() if not _trusted(recent))


def _trusted(recent: Iterable[bool]) -> bool:
    return sum(not equal for equal in recent) <= MOST_MISMATCHES
