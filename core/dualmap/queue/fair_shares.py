"""Fair shares of a pool between its clients: virtual token counters (Sheng et al., OSDI 2024, algorithm 2).

Each client has a counter of the prompt tokens that the pool computed for it. A queue dispatches a request of the client
with the smallest counter first, so clients that wait receive equal shares. No capacity stays unused: a client without
rivals gets everything.

A client that returns does not get back what it left unused: its counter is lifted to the smallest counter of the
clients that wait. Deviation: a known client stays up to ``credit_tokens`` below that, so that a client whose requests
come in bursts, but which needs less than its share on average, does not wait behind one that always wants more. A
client that is seen for the first time has no credit, so new names are no advantage.

A prefill cannot be interrupted, so what was sent to a member delays the next client. The shares are *contested* while a
client far below its share is served and one far above waits. The router then sends requests later than usual.
"""

from collections import OrderedDict
from math import inf
from typing import Final

MAX_IDLE_CLIENTS: Final = 4096
"""Counters of at most this many clients without queued requests are kept; the longest idle is forgotten first."""

# The shares stay contested for so long after a client far below its share was served.
_CONTESTED_S: Final = 30.0


class FairShares:
    """The counters of one pool's clients. Clients with queued requests are *waiting*, all others are idle."""

    def __init__(self, credit_tokens: int) -> None:
        self.credit_tokens = credit_tokens
        self._waiting: dict[int, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()
        # What the smallest counter of the waiting clients has been at most: it never falls.
        self._floor = 0
        self._contested_s = -inf

    def __len__(self) -> int:
        return len(self._waiting) + len(self._idle)

    def has_rivals(self, client: int) -> bool:
        """Return whether any other client has queued requests."""
        return len(self._waiting) > (client in self._waiting)

    def counter(self, client: int) -> int:
        """Return the counter with which a client competes, or would compete if it had queued requests."""
        waiting = self._waiting.get(client)
        return self._returning(client) if waiting is None else waiting

    def wait(self, client: int) -> None:
        """Take note that an idle client has a queued request."""
        counter = self._returning(client)
        self._idle.pop(client, None)
        self._waiting[client] = counter

    def leave(self, client: int) -> None:
        """Take note that a client's last queued request left the queue."""
        self._keep(client, self._waiting.pop(client))

    def is_contested(self, now: float) -> bool:
        """Return whether a client far below its share was served lately while one far above waited."""
        return now - self._contested_s < _CONTESTED_S

    def charge(self, now: float, client: int, tokens: int) -> None:
        """Add the tokens that a member has to compute for a client's request."""
        if self._waiting and max(self._waiting.values()) - self.counter(client) >= self.credit_tokens / 2:
            self._contested_s = now
        if client in self._waiting:
            self._waiting[client] += tokens
        else:
            self._keep(client, self._returning(client) + tokens)

    def _returning(self, client: int) -> int:
        """Return the counter of an idle client if it had a queued request now."""
        if self._waiting:
            self._floor = max(self._floor, min(self._waiting.values()))
        counter = self._idle.get(client)
        return self._floor if counter is None else max(counter, self._floor - self.credit_tokens)

    def _keep(self, client: int, counter: int) -> None:
        """Keep the counter of an idle client."""
        self._idle[client] = counter
        self._idle.move_to_end(client)
        if len(self._idle) > MAX_IDLE_CLIENTS:
            self._idle.popitem(last=False)
        if not self._waiting:
            self._floor = max(self._floor, counter)
