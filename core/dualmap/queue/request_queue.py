"""Requests that wait in the router because their member is saturated.

A queued request can move to another member without cost, which rebalancing uses (paper section 3.3).

Requests of higher priority leave the queue first. Among requests of equal priority, clients take turns by their fair
shares (``fair_shares``). The requests of one client with equal priority have one of two orders: by arrival, or with
deferral of late requests. Deferral maximises the number of requests that meet the SLO (Moore 1968, "An n job, one
machine sequencing algorithm"). The algorithm adds requests in order of arrival. If a request would be late, the
algorithm defers the longest request so far. The number of requests that overtake the oldest request is bounded, so that
no request starves.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, takewhile

from dualmap.policies.situation import Candidate
from dualmap.queue.fair_shares import FairShares
from dualmap.receipt import Key, Receipt
from dualmap.requests import Request

# The search for the next request examines at most this many requests from the head of a queue.
_EXAMINED = 64
# Predictions consider the turns of at most this many clients in a queue. With more, they assume the order of arrival,
# so that made-up names of clients do not make decisions slow.
_PREDICTED_CLIENTS = 16


@dataclass(slots=True)
class QueuedRequest:
    """A request with its chosen member: the request waits in the member's queue, or is dispatched at once.

    ``matched_tokens`` is the number of prompt tokens that the member is expected to have cached. ``compute_s`` is the
    expected time to prefill the other prompt tokens, of which the member fetches ``fetch_tokens`` from the pool's KV
    store. ``pair`` contains the members that the key maps to. ``moved`` is true after the request was rebalanced, which
    happens at most once. ``overtaken`` counts the requests that were dispatched before this request while it was the
    oldest.
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
    fetch_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """The number of prompt tokens that the member must compute."""
        return self.request.chain.tokens - self.matched_tokens - self.fetch_tokens

    def at(self, candidate: Candidate, receipt: Receipt) -> "QueuedRequest":
        """Return the request with another chosen member and its receipt."""
        return replace(
            self,
            member=candidate.id,
            matched_tokens=candidate.matched_tokens,
            fetch_tokens=candidate.fetch_tokens,
            compute_s=candidate.compute_s,
            predicted_ttft_s=receipt.predicted_ttft_s,
            receipt=receipt,
        )


class _Line:
    """The queued requests of one client and priority for one member; the tokens and seconds of their prefills."""

    __slots__ = ("client", "compute_s", "in_time", "late_s", "priority", "requests", "tokens")

    def __init__(self, client: int, priority: int) -> None:
        self.client = client
        self.priority = priority
        self.requests: OrderedDict[str, QueuedRequest] = OrderedDict()
        # The requests that can still meet the SLO. Requests that will miss it are removed and not examined again: only
        # an early end of the backlog could change the result.
        self.in_time: OrderedDict[str, QueuedRequest] = OrderedDict()
        self.tokens = 0
        self.compute_s = 0.0
        # The seconds of the requests that are not in `in_time`.
        self.late_s = 0.0

    @property
    def oldest(self) -> QueuedRequest:
        return next(iter(self.requests.values()))

    def add(self, queued: QueuedRequest) -> None:
        is_last = not self.requests or queued.request.arrived_s >= _newest(self.requests).request.arrived_s
        self.requests[queued.request.id] = self.in_time[queued.request.id] = queued
        if not is_last:
            self.requests, self.in_time = _by_arrival(self.requests), _by_arrival(self.in_time)
        self.tokens += queued.new_tokens
        self.compute_s += queued.compute_s

    def remove(self, queued: QueuedRequest) -> None:
        del self.requests[queued.request.id]
        if self.in_time.pop(queued.request.id, None) is None:
            self.late_s -= queued.compute_s
        if len(self.in_time) == len(self.requests):
            # A sum of floats does not return to zero by itself.
            self.late_s = 0.0
        self.tokens -= queued.new_tokens
        self.compute_s -= queued.compute_s

    def first_in_time(self, now: float, within_s: float) -> QueuedRequest | None:
        """Return the first request of the largest set of requests that can all meet the SLO."""
        kept: dict[int, QueuedRequest] = {}
        longest: list[tuple[float, int]] = []
        busy_s = 0.0
        for position, queued in enumerate(tuple(islice(self.in_time.values(), _EXAMINED))):
            left_s = within_s - (now - queued.request.arrived_s)
            if queued.compute_s > left_s:
                del self.in_time[queued.request.id]
                self.late_s += queued.compute_s
                continue
            kept[position] = queued
            heappush(longest, (-queued.compute_s, position))
            busy_s += queued.compute_s
            if busy_s > left_s:
                shed_s, put_off = heappop(longest)
                busy_s += shed_s
                del kept[put_off]
        return next(iter(kept.values()), None)


class MemberQueue:
    """The requests queued for one member, and their prefill work; every change calls ``changed``.

    A request that is added now overtakes the deferred requests that will miss the SLO, so these do not delay it
    (``ahead_s``). The few dispatches of the oldest request are neglected.

    Each client has a line for each priority. A line of the highest priority is next, among these that of the client
    with the smallest counter, and among equal ones that with the oldest request. ``counter`` returns a client's
    counter (``FairShares``).
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.tokens = 0
        self.compute_s = 0.0
        # The seconds of the deferred requests that will miss the SLO.
        self._late_s = 0.0
        self._changed = changed
        self.requests: OrderedDict[str, QueuedRequest] = OrderedDict()
        """The queued requests by id, in order of arrival."""
        self._lines: dict[tuple[int, int], _Line] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self.requests.values())

    @property
    def oldest_arrived_s(self) -> float:
        """The arrival time of the oldest request; the queue must not be empty."""
        return next(iter(self.requests.values())).request.arrived_s

    @property
    def ahead_s(self) -> float:
        """The seconds of prefill that go before a request that is added now."""
        return max(self.compute_s - self._late_s, 0.0)

    def in_time(self) -> Iterator[QueuedRequest]:
        """Yield the requests that go before a request that is added now, in no order."""
        for line in self._lines.values():
            yield from line.in_time.values()

    def add(self, queued: QueuedRequest) -> None:
        """Insert a request in order of arrival: a moved request may be older than the requests in this queue."""
        is_last = not self.requests or queued.request.arrived_s >= _newest(self.requests).request.arrived_s
        self.requests[queued.request.id] = queued
        if not is_last:
            self.requests = _by_arrival(self.requests)
        key = _line_of(queued)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(*key)
        line.add(queued)
        self.tokens += queued.new_tokens
        self.compute_s += queued.compute_s
        self._changed()

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request, at any position."""
        del self.requests[queued.request.id]
        key = _line_of(queued)
        line = self._lines[key]
        late_s = line.late_s
        line.remove(queued)
        self._late_s += line.late_s - late_s
        if not line.requests:
            del self._lines[key]
        self.tokens -= queued.new_tokens
        self.compute_s -= queued.compute_s
        if not self.requests:
            # A sum of floats does not return to zero by itself.
            self.compute_s = self._late_s = 0.0
        self._changed()

    def next(
        self, now: float, *, within_s: float | None, max_overtaken: int, counter: Callable[[int], int]
    ) -> QueuedRequest:
        """Return the next request to dispatch, which stays in the queue; the queue must not be empty.

        ``within_s`` is given where late requests are deferred. It is the limit for a request's wait plus computation
        that meets the SLO, after the member's backlog is deducted.
        """
        line = self._next_line(counter)
        oldest = line.oldest
        if within_s is None or oldest.overtaken >= max_overtaken:
            return oldest
        late_s = line.late_s
        first = line.first_in_time(now, within_s)
        if line.late_s != late_s:
            self._late_s += line.late_s - late_s
            self._changed()
        return first or oldest

    def take(self, queued: QueuedRequest) -> None:
        """Remove a request that is dispatched; the oldest of its line, if it is another, is overtaken."""
        oldest = self._lines[_line_of(queued)].oldest
        if queued is not oldest:
            oldest.overtaken += 1
        self.remove(queued)

    def in_turn(self, counter: Callable[[int], int]) -> Iterator[QueuedRequest]:
        """Yield the requests by priority and in the predicted order of clients' turns, each line's by arrival."""
        if len(self._lines) == 1 or len(self._lines) > _PREDICTED_CLIENTS:
            yield from self.requests.values()
            return
        turns = [
            (-line.priority, counter(line.client), line.oldest.request.arrived_s, line.client)
            for line in self._lines.values()
        ]
        heapify(turns)
        waiting = {key: iter(line.requests.values()) for key, line in self._lines.items()}
        upcoming = {key: next(requests) for key, requests in waiting.items()}
        while turns:
            rank, start, _, client = turns[0]
            key = (client, -rank)
            queued = upcoming[key]
            yield queued
            following = next(waiting[key], None)
            if following is None:
                heappop(turns)
            else:
                upcoming[key] = following
                heapreplace(turns, (rank, start + queued.new_tokens, following.request.arrived_s, client))

    def behind_s(self, client: int, priority: int, counter: Callable[[int], int]) -> float:
        """Return how much of the prefill work will be dispatched after a request that the client adds now.

        The other clients' counters are taken to grow by dispatches from this queue only.
        """
        own = self._lines.get((client, priority))
        others = len(self._lines) - (own is not None)
        if not 0 < others < _PREDICTED_CLIENTS:
            return 0.0
        start = counter(client) + (0 if own is None else own.tokens)
        behind_s = 0.0
        for line in self._lines.values():
            if line.priority < priority:
                behind_s += line.compute_s - line.late_s
            elif line.priority == priority and line.client != client:
                ahead_tokens = start - counter(line.client)
                # The request that is next when the counters are equal is as likely the other's.
                share = ahead_tokens / line.tokens + 1 / len(line.requests) if line.tokens else 1.0
                behind_s += (line.compute_s - line.late_s) * (1.0 - min(max(share, 0.0), 1.0))
        return behind_s

    def _next_line(self, counter: Callable[[int], int]) -> _Line:
        if len(self._lines) == 1:
            return next(iter(self._lines.values()))
        return min(
            self._lines.values(), key=lambda line: (-line.priority, counter(line.client), line.oldest.request.arrived_s)
        )


def _line_of(queued: QueuedRequest) -> tuple[int, int]:
    return queued.request.client, queued.request.priority


def _newest(queue: OrderedDict[str, QueuedRequest]) -> QueuedRequest:
    return next(reversed(queue.values()))


def _by_arrival(queue: OrderedDict[str, QueuedRequest]) -> OrderedDict[str, QueuedRequest]:
    return OrderedDict(sorted(queue.items(), key=lambda item: item[1].request.arrived_s))


class RequestQueue:
    """Every queued request of a pool, with the time at which it was queued, its member and its client.

    ``queue_of`` returns a member's queue. An unplaced request has no member: it waits while the pool is empty.
    """

    def __init__(self, queue_of: Callable[[str], MemberQueue], shares: FairShares) -> None:
        self._queue_of = queue_of
        self._shares = shares
        self.queues: dict[str, MemberQueue] = {}
        """The queues that are not empty, by member."""
        self._placed: dict[str, QueuedRequest] = {}
        self._unplaced: dict[str, Request] = {}
        self.unplaced_tokens = 0
        # In the order in which requests were first queued: a move to another member's queue does not change this order.
        self._since_s: OrderedDict[str, float] = OrderedDict()
        # The requests of each client with one priority, in the same order, by priority and client.
        self._levels: dict[int, dict[int, dict[str, Request]]] = {}
        # The number of queued requests of each client.
        self._clients: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._since_s

    def placed(self, request_id: str) -> QueuedRequest | None:
        """Return a queued request, or None if the request is not queued for a member."""
        return self._placed.get(request_id)

    def unplaced(self) -> tuple[Request, ...]:
        """Return the unplaced requests by priority, those of equal priority in the order in which they were queued."""
        return tuple(sorted(self._unplaced.values(), key=lambda request: -request.priority))

    def enqueue(self, now: float, queued: QueuedRequest) -> None:
        """Queue a request for its member, for the first time or again."""
        queue = self.queues[queued.member] = self._queue_of(queued.member)
        queue.add(queued)
        self._forget_unplaced(queued.request.id)
        self._placed[queued.request.id] = queued
        self._wait(now, queued.request)

    def enqueue_unplaced(self, now: float, request: Request) -> None:
        """Queue a request while no member may be picked, for the first time or again."""
        self._placed.pop(request.id, None)
        if request.id not in self._unplaced:
            self._unplaced[request.id] = request
            self.unplaced_tokens += request.chain.tokens
        self._wait(now, request)

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
        unplaced, placed = self._forget_unplaced(request_id), self._placed.pop(request_id, None)
        request = unplaced if placed is None else placed.request
        assert request is not None, "a queued request is placed or not"
        level = self._levels[request.priority]
        of_client = level[request.client]
        del of_client[request_id]
        if not of_client:
            del level[request.client]
            if not level:
                del self._levels[request.priority]
        self._clients[request.client] -= 1
        if not self._clients[request.client]:
            del self._clients[request.client]
            self._shares.leave(request.client)
        return True

    def excess(self, request: Request) -> Request | None:
        """Return the queued request that has to leave a full queue for a new one; None if the new one has less right.

        It is the newest request of the client with the most queued ones, among those of the lowest priority. The new
        request has more right if its priority is higher. If its priority is equal, it has more right if its client has
        fewer queued requests, also with the new one: shares of a full queue are equal.
        """
        lowest = min(self._levels, default=request.priority)
        level = self._levels.get(lowest, {})
        most = max(level.values(), key=len, default={})
        share = len(level.get(request.client, ())) + 1 if lowest == request.priority else 0
        return next(reversed(most.values())) if lowest <= request.priority and len(most) > share else None

    def next_expiry(self, max_wait_s: float) -> float | None:
        """Return the time at which the first request will have waited ``max_wait_s``; None for an empty queue."""
        return next(iter(self._since_s.values())) + max_wait_s if self._since_s else None

    def expired(self, now: float, max_wait_s: float) -> list[str]:
        """Return the requests that have waited for ``max_wait_s``, without their removal."""
        return list(takewhile(lambda queued: self._since_s[queued] + max_wait_s <= now, self._since_s))

    def _drop_if_empty(self, member: str) -> None:
        if not self.queues[member]:
            del self.queues[member]

    def _wait(self, now: float, request: Request) -> None:
        if request.id in self._since_s:
            return
        self._since_s[request.id] = now
        if request.client not in self._clients:
            self._clients[request.client] = 0
            self._shares.wait(request.client)
        self._clients[request.client] += 1
        self._levels.setdefault(request.priority, {}).setdefault(request.client, {})[request.id] = request

    def _forget_unplaced(self, request_id: str) -> Request | None:
        request = self._unplaced.pop(request_id, None)
        if request is not None:
            self.unplaced_tokens -= request.chain.tokens
        return request
