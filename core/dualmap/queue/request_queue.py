"""Requests that wait in the router because their member is saturated (late binding).

A queued request can move to another member at no cost, which rebalancing relies on (paper section 3.3), and a member
that receives work late receives the right work. The order is by arrival, or it defers. All requests have the same time
to their first token, so most of them meet it in order of arrival if the longest is put off whenever one would be late
(Moore 1968, "An n job, one machine sequencing algorithm"). The oldest request is overtaken a bounded number of times,
so that none starves.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile

from dualmap.receipt import Key, Receipt
from dualmap.requests import Request

# At most this many requests from the head of a queue are examined to find the next.
_EXAMINED = 64


@dataclass(slots=True)
class QueuedRequest:
    """A request with the member that it is placed at: it waits in that member's queue, or is dispatched at once.

    ``matched_tokens`` of its prompt will be cached there when it is dispatched, and ``compute_s`` is the expected time
    to compute the rest. ``pair`` are the members that its key maps to. ``moved`` is true once it was rebalanced, which
    happens at most once. ``overtaken`` counts how often others were dispatched before it while it was the oldest.
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
        """Prompt tokens that the member will have to compute."""
        return self.request.chain.tokens - self.matched_tokens


class MemberQueue:
    """The requests queued for one member, and their prefill work; every change calls ``changed``."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.tokens = 0
        self.compute_s = 0.0
        self._changed = changed
        self.requests: OrderedDict[str, QueuedRequest] = OrderedDict()
        """The queued requests by id, in order of arrival."""
        # The requests that may still be in time. One that is too late stays so unless a backlog ends early, and is not
        # examined again.
        self._in_time: OrderedDict[str, QueuedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self.requests.values())

    @property
    def oldest_arrived_s(self) -> float:
        """When the oldest request arrived; the queue must not be empty."""
        return next(iter(self.requests.values())).request.arrived_s

    def add(self, queued: QueuedRequest) -> None:
        """Insert a request by its arrival: one that was moved here may be older than the others."""
        last = next(reversed(self.requests.values()), None)
        self.requests[queued.request.id] = self._in_time[queued.request.id] = queued
        if last is not None and queued.request.arrived_s < last.request.arrived_s:
            self.requests = _by_arrival(self.requests)
            self._in_time = _by_arrival(self._in_time)
        self.tokens += queued.new_tokens
        self.compute_s += queued.compute_s
        self._changed()

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request, at any position."""
        del self.requests[queued.request.id]
        self._in_time.pop(queued.request.id, None)
        self.tokens -= queued.new_tokens
        # A sum of floats does not return to zero by itself.
        self.compute_s = self.compute_s - queued.compute_s if self.requests else 0.0
        self._changed()

    def next(self, now: float, *, within_s: float | None, max_overtaken: int) -> QueuedRequest:
        """Return the next request to dispatch, which stays in the queue; the queue must not be empty.

        ``within_s`` is given where late requests are deferred. It is the limit for a request's wait plus computation
        that meets the SLO, after the member's backlog is deducted.
        """
        oldest = next(iter(self.requests.values()))
        if within_s is None or oldest.overtaken >= max_overtaken:
            return oldest
        return self._first_in_time(now, within_s) or oldest

    def take(self, queued: QueuedRequest) -> None:
        """Remove a request that is dispatched; the oldest, if it is another, is overtaken."""
        oldest = next(iter(self.requests.values()))
        if queued is not oldest:
            oldest.overtaken += 1
        self.remove(queued)

    def _first_in_time(self, now: float, within_s: float) -> QueuedRequest | None:
        """Return the first request of the largest set that can meet the SLO."""
        kept: dict[int, QueuedRequest] = {}
        longest: list[tuple[float, int]] = []
        busy_s = 0.0
        for position, queued in enumerate(tuple(islice(self._in_time.values(), _EXAMINED))):
            left_s = within_s - (now - queued.request.arrived_s)
            if queued.compute_s > left_s:
                del self._in_time[queued.request.id]
                continue
            kept[position] = queued
            heappush(longest, (-queued.compute_s, position))
            busy_s += queued.compute_s
            if busy_s > left_s:
                shed_s, put_off = heappop(longest)
                busy_s += shed_s
                del kept[put_off]
        return next(iter(kept.values()), None)


def _by_arrival(queue: OrderedDict[str, QueuedRequest]) -> OrderedDict[str, QueuedRequest]:
    return OrderedDict(sorted(queue.items(), key=lambda item: item[1].request.arrived_s))


class RequestQueue:
    """Every queued request of a pool: since when it waits, and for which member.

    ``queue_of`` returns a member's queue. An unplaced request waits for the first member of an empty pool.
    """

    def __init__(self, queue_of: Callable[[str], MemberQueue]) -> None:
        self._queue_of = queue_of
        self.queues: dict[str, MemberQueue] = {}
        """The queues that are not empty, by member."""
        self._placed: dict[str, QueuedRequest] = {}
        self._unplaced: dict[str, Request] = {}
        self.unplaced_tokens = 0
        # In the order of being queued first: a request that moves to another member's queue keeps its place.
        self._since_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def placed(self, request_id: str) -> QueuedRequest | None:
        """Return a request that is queued for a member, or None for any other."""
        return self._placed.get(request_id)

    def unplaced(self) -> tuple[Request, ...]:
        """Return the unplaced requests, in the order of being queued."""
        return tuple(self._unplaced.values())

    def enqueue(self, now: float, queued: QueuedRequest) -> None:
        """Queue a request for its member, for the first time or again."""
        queue = self.queues[queued.member] = self._queue_of(queued.member)
        queue.add(queued)
        self._forget_unplaced(queued.request.id)
        self._placed[queued.request.id] = queued
        self._since_s.setdefault(queued.request.id, now)

    def enqueue_unplaced(self, now: float, request: Request) -> None:
        """Queue a request that no member can take, for the first time or again."""
        self._placed.pop(request.id, None)
        if request.id not in self._unplaced:
            self._unplaced[request.id] = request
            self.unplaced_tokens += request.chain.tokens
        self._since_s.setdefault(request.id, now)

    def take(self, queued: QueuedRequest) -> None:
        """Take a request out of its member's queue to dispatch it."""
        self.queues[queued.member].take(queued)
        self._drop_if_empty(queued.member)

    def withdraw(self, queued: QueuedRequest) -> None:
        """Remove a request from its member's queue, to place it again or to drop it."""
        self.queues[queued.member].remove(queued)
        self._drop_if_empty(queued.member)

    def forget(self, request_id: str) -> bool:
        """Forget a request that has left its member's queue and will not return; return whether it was queued."""
        if self._since_s.pop(request_id, None) is None:
            return False
        self._forget_unplaced(request_id)
        self._placed.pop(request_id, None)
        return True

    def next_expiry(self, max_wait_s: float) -> float | None:
        """Return when the request that is queued for longest has waited ``max_wait_s``, or None if none is queued."""
        return next(iter(self._since_s.values())) + max_wait_s if self._since_s else None

    def expired(self, now: float, max_wait_s: float) -> list[str]:
        """Return the requests that have waited for ``max_wait_s``; they stay queued."""
        return list(takewhile(lambda queued: self._since_s[queued] + max_wait_s <= now, self._since_s))

    def _drop_if_empty(self, member: str) -> None:
        if not self.queues[member]:
            del self.queues[member]

    def _forget_unplaced(self, request_id: str) -> None:
        request = self._unplaced.pop(request_id, None)
        if request is not None:
            self.unplaced_tokens -= request.chain.tokens
