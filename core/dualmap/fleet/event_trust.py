"""Whether the cached tokens that an engine counts agree with its KV events.

A publisher can hang, a topic can be wrong, and an engine's block hashes can be of other token ids than the router's.
The router then counts blocks that the engine does not have, or does not count blocks that it has. The engine's
``usage`` shows both. After a majority of wrong predictions, the router's own record counts until the engine's next
start.
"""

from typing import Final

from dualmap.fleet.samples import RecentSamples

# The median is taken over this many predictions. The first ones stand for right ones. One client provides less than
# half, because a client may know fields of a request that change the engine's count.
_WINDOW: Final = 15
_MOST_OF_CLIENT: Final = 7
_PRIORS: Final = 8

CONTRADICTED: Final = "the engine counts other cached tokens than its events show, so the router's own record counts"


class EventTrust:
    """Compares predictions by the events of one member with the engine's counts."""

    def __init__(self) -> None:
        self._wrong = RecentSamples(window=_WINDOW, most=_MOST_OF_CLIENT, prior=0.0, priors=_PRIORS)
        self.contradicted = False
        """Whether most of the last predictions were wrong."""

    def judge(self, now: float, client: int, *, is_wrong: bool) -> None:
        """Record whether a prediction for a client's request was wrong."""
        if self._wrong.add(now, client, float(is_wrong)):
            self.contradicted = self.contradicted or self._wrong.median > 0.0
