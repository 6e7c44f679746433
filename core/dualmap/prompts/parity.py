"""Compares the router's number of prompt tokens with the engine's, for each class of requests.

A class is a model, an API, and whether the request has tools. Token ids that are wrong for one request of a class are
probably wrong for others as well: another template, another version of the tokenizer. The router therefore stops using
the ids of a class when more than a few recent counts differ, and uses them again when all recent counts are equal. With
one limit for both, a class with a few mismatches would change all the time.

Comparisons with one tokenizer say nothing about another one, so each has classes of its own.
"""

from collections import OrderedDict, deque
from typing import Final, NamedTuple

from dualmap.prompts.api import Api

WINDOW: Final = 100
"""The last requests of a class that count."""
MOST_MISMATCHES: Final = 1
"""The most different counts in a window; with more, the ids of the class are not used until no count differs."""
CLASSES_MAX: Final = 1024
"""The most classes of a pool. Clients choose neither models nor APIs freely, so a pool has few."""


class TokenClass(NamedTuple):
    """Requests whose ids are right or wrong together. ``source`` is the number of the tokenizer of their ids."""

    model: str
    api: Api
    has_tools: bool
    source: int = 0


class Compared(NamedTuple):
    """The result of one comparison; ``changed`` is true if it changed whether the class is trusted."""

    equal: bool
    trusted: bool
    changed: bool


class TokenParity:
    """The recent comparisons of one pool."""

    def __init__(self) -> None:
        # Whether each recent count was equal.
        self._recent: OrderedDict[TokenClass, deque[bool]] = OrderedDict()
        self._distrusted: set[TokenClass] = set()

    def trusts(self, requests: TokenClass) -> bool:
        """Return whether the ids of a class may be used. A class without comparisons is trusted."""
        return requests not in self._distrusted

    def compare(self, requests: TokenClass, own: int, engines: int) -> Compared:
        """Add the number of prompt tokens of one request, as the router and the engine counted it."""
        recent = self._recent.get(requests)
        if recent is None:
            recent = self._recent[requests] = deque(maxlen=WINDOW)
            if len(self._recent) > CLASSES_MAX:
                self._distrusted.discard(self._recent.popitem(last=False)[0])
        before = self.trusts(requests)
        recent.append(own == engines)
        mismatches = recent.count(False)
        if mismatches > MOST_MISMATCHES:
            self._distrusted.add(requests)
        elif not mismatches:
            self._distrusted.discard(requests)
        after = self.trusts(requests)
        return Compared(equal=own == engines, trusted=after, changed=before != after)

    @property
    def distrusted(self) -> tuple[TokenClass, ...]:
        """The classes whose ids are not used."""
        return tuple(each for each in self._recent if each in self._distrusted)
