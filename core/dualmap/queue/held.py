"""Requests that wait in the router for one instance, since it has enough to do already (late binding).

Moving a request is free as long as it waits here, which is what rebalancing lives on (paper section 3.3), and an engine
that is handed work late is handed the right work. The order is by arrival, or it defers: since all have the same time
to their first token, the most of them meet it in order of arrival once the longest is put off whenever one would be
late (Moore 1968, "An n job, one machine sequencing algorithm"). The oldest is passed over a bounded number of times,
so that nobody starves.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile

from dualmap.receipt import Key, Receipt
from dualmap.requests import Request

# No more than these, from the head of a queue, are looked at to find whose turn it is.
_LOOKED_AT = 64


@dataclass(slots=True)
class Waiting:
    """One held request, placed at ``member`` like one that was handed over.

    ``matched_tokens`` of its prompt will be cached there when its turn comes, and computing the rest should take
    ``compute_s``. ``pair`` are the members its key maps to; ``moved`` says that it was migrated, which happens once;
    it was ``overtaken`` that often since it is the oldest in its queue.
    """

    request: Request
    key: Key
    pair: tuple[str, ...]
    member: str
    matched_tokens: int
    compute_s: float
    predicted_ttft_s: float
    receipt: Receipt
    moved: bool = False
    overtaken: int = 0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens the instance will have to compute."""
        return self.request.chain.tokens - self.matched_tokens


class HeldQueue:
    """The requests held for one instance, and the prefill work they stand for."""

    def __init__(self) -> None:
        self.tokens = 0
        self.compute_s = 0.0
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        # Those not yet seen to be too late. Who is, stays so unless a backlog ends early, and is not looked at again.
        self._hopeful: OrderedDict[str, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def add(self, waiting: Waiting) -> None:
        """Put a request in its place by arrival: one that was moved here may be older than those who wait."""
        last = next(reversed(self._waiting.values()), None)
        self._waiting[waiting.request.id] = self._hopeful[waiting.request.id] = waiting
        if last is not None and waiting.request.arrived_s < last.request.arrived_s:
            self._waiting = _by_arrival(self._waiting)
            self._hopeful = _by_arrival(self._hopeful)
        self.tokens += waiting.new_tokens
        self.compute_s += waiting.compute_s

    def remove(self, waiting: Waiting) -> None:
        """Take a request out, wherever it stands."""
        del self._waiting[waiting.request.id]
        self._hopeful.pop(waiting.request.id, None)
        self.tokens -= waiting.new_tokens
        # Summed floats do not come back to nothing by themselves.
        self.compute_s = self.compute_s - waiting.compute_s if self._waiting else 0.0

    def next(self, now: float, *, within_s: float | None, max_overtaken: int) -> Waiting:
        """Return the request whose turn it is; the queue must not be empty. It stays in the queue.

        ``within_s`` is given where late requests are deferred: how long after its arrival a request may have waited and
        be computed to meet the SLO, behind what its instance has to do before.
        """
        oldest = next(iter(self._waiting.values()))
        if within_s is None or oldest.overtaken >= max_overtaken:
            return oldest
        return self._first_in_time(now, within_s) or oldest

    def take(self, waiting: Waiting) -> None:
        """Take a request out since its turn has come."""
        oldest = next(iter(self._waiting.values()))
        if waiting is not oldest:
            oldest.overtaken += 1
        self.remove(waiting)

    def _first_in_time(self, now: float, within_s: float) -> Waiting | None:
        """Return the first of the requests that are to meet the SLO, if as many as can be are."""
        kept: dict[int, Waiting] = {}
        longest: list[tuple[float, int]] = []
        busy_s = 0.0
        for position, waiting in enumerate(tuple(islice(self._hopeful.values(), _LOOKED_AT))):
            left_s = within_s - (now - waiting.request.arrived_s)
            if waiting.compute_s > left_s:
                del self._hopeful[waiting.request.id]
                continue
            kept[position] = waiting
            heappush(longest, (-waiting.compute_s, position))
            busy_s += waiting.compute_s
            if busy_s > left_s:
                shed_s, put_off = heappop(longest)
                busy_s += shed_s
                del kept[put_off]
        return next(iter(kept.values()), None)


def _by_arrival(queue: OrderedDict[str, Waiting]) -> OrderedDict[str, Waiting]:
    return OrderedDict(sorted(queue.items(), key=lambda item: item[1].request.arrived_s))


class HeldRequests:
    """Every request of a pool that is held: who waits since when, and where.

    A ``homeless`` request waits for any first member, since there is none; ``homeless_tokens`` are their prompts'.
    """

    def __init__(self) -> None:
        self.homeless: dict[str, Request] = {}
        self.homeless_tokens = 0
        self._placed: dict[str, Waiting] = {}
        # In the order of being first held: a request that moves to another queue keeps its place here.
        self._since_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def placed(self, request_id: str) -> Waiting | None:
        """Return a request that is held for an instance, None for any other."""
        return self._placed.get(request_id)

    def hold(self, now: float, waiting: Waiting) -> None:
        """Hold a request for an instance, as a new one or as one that was held before."""
        self._leave_homeless(waiting.request.id)
        self._placed[waiting.request.id] = waiting
        self._since_s.setdefault(waiting.request.id, now)

    def hold_homeless(self, now: float, request: Request) -> None:
        """Hold a request that no instance may take, as a new one or as one that was held before."""
        self._placed.pop(request.id, None)
        if request.id not in self.homeless:
            self.homeless[request.id] = request
            self.homeless_tokens += request.chain.tokens
        self._since_s.setdefault(request.id, now)

    def release(self, request_id: str) -> bool:
        """Forget a request that was handed over or refused, or whose client has gone; return whether it was held."""
        self._leave_homeless(request_id)
        self._placed.pop(request_id, None)
        return self._since_s.pop(request_id, None) is not None

    def next_expiry(self, max_wait_s: float) -> float | None:
        """Return when the request that was held for longest has waited ``max_wait_s``, or None when there is none."""
        return next(iter(self._since_s.values())) + max_wait_s if self._since_s else None

    def expired(self, now: float, max_wait_s: float) -> list[str]:
        """Return the requests that have waited for ``max_wait_s``; they stay."""
        return list(takewhile(lambda held: self._since_s[held] + max_wait_s <= now, self._since_s))

    def _leave_homeless(self, request_id: str) -> None:
        request = self.homeless.pop(request_id, None)
        if request is not None:
            self.homeless_tokens -= request.chain.tokens
