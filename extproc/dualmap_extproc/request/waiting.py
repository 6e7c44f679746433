"""The requests that wait for the answer of their pool's router, and the order in which their streams are resumed."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dualmap.shared_router import Router
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.observations import Arrival
from dualmap_extproc.request.picked import Picked


@dataclass(slots=True, kw_only=True)
class WaitingRequest:
    """A request without an outcome: its router, and the function that resumes its stream.

    ``since_s`` is the time when the request was queued; None while only another router's answer is awaited. ``quoted``
    is the text of the request that a debug line may quote.
    """

    router: Router
    since_s: float | None
    arrival: Arrival
    quoted: Mapping[str, object]
    resume: Callable[[Picked | Refused], None]

    def queued_s(self, now: float) -> float | None:
        """Return the time in the queue; None for a request that was not queued."""
        return None if self.since_s is None else now - self.since_s


class WaitingRequests:
    """The waiting requests, by request id. ``resume`` resumes the streams of those that ``answer`` answered.

    A resumed stream may end its request, which may release further requests. The outermost call of ``resume`` resumes
    the streams of these requests later.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, WaitingRequest] = {}
        # The answers of requests, before their streams are resumed.
        self._answers: deque[tuple[str, Picked | Refused]] = deque()
        self._resuming = False
        self.on_first: Callable[[], None] = lambda: None
        """The function that ``announce`` calls."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request_id: str, waiting: WaitingRequest) -> None:
        """Keep a request until it is resumed or popped."""
        self._waiting[request_id] = waiting

    def announce(self) -> None:
        """Call ``on_first`` if only one request waits."""
        if len(self._waiting) == 1:
            self.on_first()

    def get(self, request_id: str) -> WaitingRequest | None:
        """Return a request that waits, or None."""
        return self._waiting.get(request_id)

    def pop(self, request_id: str) -> WaitingRequest | None:
        """Remove a request, whose stream is then not resumed; return None if it does not wait."""
        return self._waiting.pop(request_id, None)

    def of_pools(self, pools: Collection[str]) -> tuple[tuple[str, WaitingRequest], ...]:
        """Return the requests of some pools."""
        return tuple(each for each in self._waiting.items() if each[1].router.pool.id in pools)

    def answer(self, request_id: str, answer: Picked | Refused) -> None:
        """Set the answer with which ``resume`` resumes the request's stream."""
        self._answers.append((request_id, answer))

    def resume(self, arriving: str = "") -> Picked | Refused | None:
        """Resume the streams of all answered requests.

        If the request ``arriving`` is among them, return its answer, because its stream does not wait yet.
        """
        arrived: Picked | Refused | None = None
        if self._resuming:
            return None
        self._resuming = True
        try:
            while self._answers:
                request_id, answer = self._answers.popleft()
                waiting = self._waiting.pop(request_id, None)
                if waiting is None:
                    continue
                if request_id == arriving:
                    arrived = answer
                else:
                    waiting.resume(answer)
        finally:
            self._resuming = False
        return arrived
