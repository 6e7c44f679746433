"""The requests of other routers in one router's accounts: their questions, their progress, and the answers to them."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from math import inf
from typing import Final

from dualmap.fleet.ledger import ENDED_MAX
from dualmap.ownership.messages import Answer, Ask, Declined, Message, Progress, Sent, Step
from dualmap.requests import Outcome, Rejection
from dualmap.router import PoolRouter

# The interval in which the speed in answers is computed again, because this takes longer the more members there are.
_SPEED_EVERY_S: Final = 1.0


class Guests:
    """The requests of other routers that ``router`` accounts for; ``send`` sends a message to a router.

    Each method returns outcomes of ``router``, which also releases requests of this router. ``answer`` sends the
    outcomes of the other routers' requests, and returns the rest.
    """

    def __init__(self, router: PoolRouter, send: Callable[[str, Message], None]) -> None:
        self._router = router
        self._send = send
        # The router of each request, and the number of its question.
        self._routers: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        # The routers of the last requests that ended, since the engine's token counts may come later.
        self._ended: OrderedDict[str, str] = OrderedDict()
        # The routers that have ended, or to which the connection is lost, while their requests are in flight.
        self._lost: set[str] = set()
        self._tokens_per_second = 0.0
        self._speed_due_s = -inf

    def __len__(self) -> int:
        return len(self._routers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._routers

    def ask(self, now: float, peer: str, ask: Ask) -> tuple[Outcome, ...]:
        """Decide a request of another router. Its id must be unknown."""
        request = ask.request._replace(arrived_s=now - ask.age_s)
        answer, outcomes = self._router.on_request(now, request)
        self._routers[request.id], self._numbers[request.id] = peer, ask.number
        return (answer, *outcomes)

    def decline(self, peer: str, request_id: str, number: int) -> None:
        """Tell another router that this router does not decide its request, in answer to its question ``number``."""
        self._send(peer, Declined(request_id=request_id, number=number))

    def take_over(self, now: float, peer: str, sent: Sent) -> None:
        """Account for a request in flight of another router; ignore an endpoint that the pool does not have."""
        if self._router.take_over(now, sent.received(now)):
            self._routers[sent.request.id] = peer

    def progress(self, now: float, peer: str, progress: Progress) -> tuple[Outcome, ...]:
        """Apply another router's report of one of its requests; ignore an unknown request."""
        request_id, router, usage = progress.request_id, self._router, progress.usage
        if progress.step is Step.COUNTED:
            if usage is not None and self._ended.get(request_id) == peer:
                router.on_usage(now, request_id, usage)
            return ()
        if self._routers.get(request_id) != peer:
            return ()
        match progress.step:
            case Step.HEARD:
                router.on_heard(now, request_id)
                return ()
            case Step.FIRST_TOKEN:
                return router.on_first_token(now, request_id).outcomes
            case Step.SERVED:
                return router.on_served(now, request_id, progress.endpoint).outcomes
            case Step.FINISHED:
                self._end(request_id)
                return router.on_finished(now, request_id, usage).outcomes
            case Step.FAILED:
                self._end(request_id)
                return router.on_failed(now, request_id).outcomes
            case Step.ABORTED:
                self._end(request_id)
                return router.on_aborted(now, request_id).outcomes

    def orphan(self, now: float, progress: Progress) -> tuple[Outcome, ...]:
        """Apply a report of a request whose router has ended; ignore requests of other routers."""
        peer = self._routers.get(progress.request_id)
        return () if peer is None or peer not in self._lost else self.progress(now, peer, progress)

    def left(self, now: float, peer: str) -> tuple[Outcome, ...]:
        """Drop all requests of a router, because another router accounts for them from now on."""
        return self._drop(now, [each for each, router in self._routers.items() if router == peer])

    def lost(self, now: float, peer: str) -> tuple[Outcome, ...]:
        """Drop the queued requests of a router that has ended. The members still serve those in flight."""
        of_peer = [each for each, router in self._routers.items() if router == peer]
        self._lost = {peer, *self._lost}.intersection(self._routers.values())
        return self._drop(now, [each for each in of_peer if self._router.is_queued(each)])

    def decline_queued(self, now: float) -> tuple[Outcome, ...]:
        """Return all queued requests to their routers, because this router no longer decides them."""
        queued = [each for each in self._routers if self._router.is_queued(each)]
        for request_id in queued:
            self.decline(self._routers[request_id], request_id, self._numbers.get(request_id, 0))
        return self._drop(now, queued)

    def forget(self, request_id: str) -> bool:
        """Forget a request that expired in the router's accounts; return whether it was another router's."""
        self._numbers.pop(request_id, None)
        return self._routers.pop(request_id, None) is not None

    def answer(self, now: float, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Send the outcomes of the other routers' requests; return the outcomes of this router's requests."""
        if not self._routers:
            return outcomes
        own: list[Outcome] = []
        for outcome in outcomes:
            peer = self._routers.get(outcome.request_id)
            if peer is None:
                own.append(outcome)
                continue
            number = self._numbers.get(outcome.request_id, 0)
            if isinstance(outcome, Rejection):
                self.forget(outcome.request_id)
            self._send(peer, Answer(outcome=outcome, tokens_per_second=self._speed(now), number=number))
        return tuple(own)

    def _end(self, request_id: str) -> None:
        self._ended[request_id] = self._routers[request_id]
        self.forget(request_id)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _speed(self, now: float) -> float:
        if now >= self._speed_due_s:
            self._tokens_per_second = self._router.solo_tokens_per_second()
            self._speed_due_s = now + _SPEED_EVERY_S
        return self._tokens_per_second

    def _drop(self, now: float, requests: Collection[str]) -> tuple[Outcome, ...]:
        """Remove requests from the accounts."""
        outcomes: tuple[Outcome, ...] = ()
        for request_id in requests:
            outcomes += self._router.hand_over(now, request_id).outcomes
        # A request that another one's end released is dropped, too, so its outcome is sent to no router.
        for request_id in requests:
            self.forget(request_id)
        dropped = frozenset(requests)
        return tuple(each for each in outcomes if each.request_id not in dropped)
