"""Fair shares of a pool between its clients: virtual token counters (Sheng et al., OSDI 2024, section 4).

Each client has a counter of the prompt tokens that the pool computed for it. A queue dispatches a request of the client
with the smallest counter first, so clients that wait receive equal shares. No capacity stays unused: a client without
rivals gets everything.

Capacity that a client left unused is lost, except for a credit: no counter is more than ``credit_tokens`` below the
largest one. A client whose requests come in bursts, but which needs less than its share on average, therefore does not
wait behind a client that always wants more. Deviation: the counter of a new client starts at the largest counter and
not at the smallest, so that many made-up names do not overtake a known client.

An engine does not interrupt a prefill, so each request that was sent delays the next client. The shares are *contested*
while a client far below its share is served and another client waits. The router then sends requests later than usual.
"""

from collections import OrderedDict
from math import inf
from typing import Final

MAX_IDLE_CLIENTS: Final = 4096
"""At most this many clients without queued requests have a counter; the longest idle client is forgotten first."""

# The shares stay contested for so long after a client far below its share was served.
_CONTESTED_S: Final = 30.0


class FairShares:
    """The counters of one pool's clients: of those that *wait*, which have queued requests, and of idle ones."""

    def __init__(self, credit_tokens: int) -> None:
        self.credit_tokens = credit_tokens
        self._waiting: dict[int, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()
        # The largest counter that any client ever had.
        self._largest = 0
        self._contested_s = -inf

    def __len__(self) -> int:
        return len(self._waiting) + len(self._idle)

    def counter(self, client: int) -> int:
        """Return a client's counter."""
        counter = self._waiting.get(client)
        if counter is None:
            counter = self._idle.get(client, self._largest)
        least = self._largest - self.credit_tokens
        # Every dispatch runs this: max() takes three times as long.
        return counter if counter > least else least

    def wait(self, client: int) -> None:
        """Take note that a client has queued requests."""
        self._waiting[client] = self.counter(client)
        self._idle.pop(client, None)

    def leave(self, client: int) -> None:
        """Take note that a client's last queued request left the queue."""
        self._keep_idle(client, self._waiting.pop(client))

    def charge(self, now: float, client: int, tokens: int) -> None:
        """Add the tokens that a member has to compute for a client's request."""
        counter = self.counter(client)
        if self._waiting and self.has_rivals(client) and self._largest - counter >= self.credit_tokens / 2:
            self._contested_s = now
        counter += tokens
        if counter > self._largest:
            self._largest = counter
        if client in self._waiting:
            self._waiting[client] = counter
        else:
            self._keep_idle(client, counter)

    def has_rivals(self, client: int) -> bool:
        """Return whether any other client has queued requests."""
        return len(self._waiting) > (client in self._waiting)

    def is_contested(self, now: float) -> bool:
        """Return whether a client far below its share was served lately while another client waited."""
        return now - self._contested_s < _CONTESTED_S

    def _keep_idle(self, client: int, counter: int) -> None:
        self._idle[client] = counter
        self._idle.move_to_end(client)
        if len(self._idle) > MAX_IDLE_CLIENTS:
            self._idle.popitem(last=False)
