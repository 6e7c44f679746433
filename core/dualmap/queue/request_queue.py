"""Requests that wait in the router because their member is saturated.

A queued request can move to another member without cost, which rebalancing uses (paper section 3.3). A queue has one of
two orders: by arrival, or with deferral of late requests. Deferral maximises the number of requests that meet the SLO
(Moore 1968, "An n job, one machine sequencing algorithm"). The algorithm adds requests in order of arrival. If a
request would be late, the algorithm defers the longest request so far. The number of requests that overtake the oldest
request is bounded, so that no request starves.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile

from dualmap.receipt import Key, Receipt
from dualmap.requests import Request

# The search for the next request examines at most this many requests from the head of a queue.
_EXAMINED = 64


@dataclass(slots=True)
class QueuedRequest:
    """A request with its chosen member: the request waits in the member's queue, or is dispatched at once.

    ``matched_tokens`` is the number of prompt tokens that the member is expected to have cached. ``compute_s`` is the
    expected time to compute the other prompt tokens. ``pair`` contains the members that the key maps to. ``moved`` is
    true after the request was rebalanced, which happens at most once. ``overtaken`` counts the requests that were
    dispatched before this request while it was the oldest.
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
        """The number of prompt tokens that the member must compute."""
        return self.request.chain.tokens - self.matched_tokens


class MemberQueue:
    """The requests queued for one member, and their total prefill work. Every change calls ``changed``."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.tokens = 0
        self.compute_s = 0.0
        self._changed = changed
        self.requests: OrderedDict[str, QueuedRequest] = OrderedDict()
        """The queued requests by id, in order of arrival."""
        # The requests that can still meet the SLO. Requests that will miss it are removed and not examined again: only
        # an early end of the backlog could change the result.
        self._in_time: OrderedDict[str, QueuedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self.requests.values())

    def add(self, queued: QueuedRequest) -> None:
        """Insert a request in order of arrival: a moved request may be older than the requests in this queue."""
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
        # Floating-point rounding would leave a sum other than zero for an empty queue.
        self.compute_s = self.compute_s - queued.compute_s if self.requests else 0.0
        self._changed()

    def next(self, now: float, *, within_s: float | None, max_overtaken: int) -> QueuedRequest:
        """Return the next request to dispatch, which stays in the queue; the queue must not be empty.

        ``within_s`` is None if late requests are not deferred. With deferral, ``within_s`` is the SLO minus the
        member's backlog. A request meets the SLO if its wait plus its computation takes at most ``within_s``.
        """
        oldest = next(iter(self.requests.values()))
        if within_s is None or oldest.overtaken >= max_overtaken:
            return oldest
        return self._first_in_time(now, within_s) or oldest

    def take(self, queued: QueuedRequest) -> None:
        """Remove a dispatched request; if it is not the oldest request, count an overtake of the oldest request."""
        oldest = next(iter(self.requests.values()))
        if queued is not oldest:
            oldest.overtaken += 1
        self.remove(queued)

    def _first_in_time(self, now: float, within_s: float) -> QueuedRequest | None:
        """Return the first request of the largest set of requests that can all meet the SLO."""
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
    """Every queued request of a pool, with the time at which it was queued and its member.

    ``queue_of`` returns a member's queue. An unplaced request has no member: it waits while the pool is empty.
    """

    def __init__(self, queue_of: Callable[[str], MemberQueue]) -> None:
        self._queue_of = queue_of
        self.queues: dict[str, MemberQueue] = {}
        """The queues that are not empty, by member."""
        self._placed: dict[str, QueuedRequest] = {}
        self._unplaced: dict[str, Request] = {}
        self.unplaced_tokens = 0
        # In the order in which requests were first queued: a move to another member's queue does not change this order.
        self._since_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def placed(self, request_id: str) -> QueuedRequest | None:
        """Return a queued request, or None if the request is not queued for a member."""
        return self._placed.get(request_id)

    def unplaced(self) -> tuple[Request, ...]:
        """Return the unplaced requests, in the order in which they were queued."""
        return tuple(self._unplaced.values())

    def enqueue(self, now: float, queued: QueuedRequest) -> None:
        """Queue a request for its member, for the first time or again."""
        queue = self.queues[queued.member] = self._queue_of(queued.member)
        queue.add(queued)
        self._forget_unplaced(queued.request.id)
        self._placed[queued.request.id] = queued
        self._since_s.setdefault(queued.request.id, now)

    def enqueue_unplaced(self, now: float, request: Request) -> None:
        """Queue a request while no member may be picked, for the first time or again."""
        self._placed.pop(request.id, None)
        if request.id not in self._unplaced:
            self._unplaced[request.id] = request
            self.unplaced_tokens += request.chain.tokens
        self._since_s.setdefault(request.id, now)

    def take(self, queued: QueuedRequest) -> None:
        """Remove a request from its member's queue for its dispatch."""
        self.queues[queued.member].take(queued)
        self._drop_if_empty(queued.member)

    def withdraw(self, queued: QueuedRequest) -> None:
        """Remove a request from its member's queue, to place it again or to drop it."""
        self.queues[queued.member].remove(queued)
        self._drop_if_empty(queued.member)

    def forget(self, request_id: str) -> bool:
        """Remove all records of a request that has left its member's queue; return whether the request was queued."""
        if self._since_s.pop(request_id, None) is None:
            return False
        self._forget_unplaced(request_id)
        self._placed.pop(request_id, None)
        return True

    def next_expiry(self, max_wait_s: float) -> float | None:
        """Return the time at which the first request will have waited ``max_wait_s``; None for an empty queue."""
        return next(iter(self._since_s.values())) + max_wait_s if self._since_s else None

    def expired(self, now: float, max_wait_s: float) -> list[str]:
        """Return the requests that have waited for ``max_wait_s``, without their removal."""
        return list(takewhile(lambda queued: self._since_s[queued] + max_wait_s <= now, self._since_s))

    def _drop_if_empty(self, member: str) -> None:
        if not self.queues[member]:
            del self.queues[member]

    def _forget_unplaced(self, request_id: str) -> None:
        request = self._unplaced.pop(request_id, None)
        if request is not None:
            self.unplaced_tokens -= request.chain.tokens
