"""One pool's router among several routers: it asks the pool's owner, and decides by itself while no owner answers.

``SharedRouter`` has the methods of ``PoolRouter``, and wraps one: its own accounts. One of the live routers owns the
pool (``dualmap.ownership``). A router that does not own the pool asks the owner for each of its requests, and reports
each request's progress to the owner. The owner's ``PoolRouter`` accounts for the requests of all routers, so it decides
like a single router.

Each request of this router is in the accounts of one router: this router, or the owner. If the owner changes, every
router moves its own requests to the new owner's accounts: it asks again for queued requests, and sends those in flight.
A router without an answer in ANSWER_TIMEOUT_S decides by itself. After MISSES_MAX missed answers in a row, it does not
ask the owner for PAUSE_S. It moves these requests to the owner with the owner's next answer. Two routers that both own
a pool both decide, each with a part of the requests. No request is lost in any of these cases, and none is queued for
longer than the pool's longest wait.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

from dualmap.engines.profile import EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceStatus
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.guests import Guests
from dualmap.own_requests import InFlight, OwnRequests, Waiting
from dualmap.ownership.election import Election
from dualmap.ownership.messages import Answer, Ask, Declined, Left, Message, Progress, Sent, Step
from dualmap.ownership.missed_answers import ANSWER_TIMEOUT_S, MissedAnswers
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap.replicas.update import ReplicaUpdate, SharedBinding
from dualmap.requests import (
    Asked,
    Completion,
    Decision,
    Effects,
    FirstToken,
    Outcome,
    PoolSnapshot,
    Queued,
    Rejection,
    Request,
    Usage,
)
from dualmap.router import PoolRouter

AnswerT = TypeVar("AnswerT")
# A response that continues is reported to the owner at most this often. Requests without reports expire after minutes.
_HEARD_EVERY_S: Final = 10.0


class RemoteDecision(NamedTuple):
    """How a decision of which another router is the owner was made, and the seconds until then.

    ``result`` is ``answered`` by the owner, ``timeout`` and ``refused`` if this router decided after it had asked, and
    ``local`` if it decided without asking.
    """

    result: str
    seconds: float


class SharedRouter:
    """Routes this router's requests of one pool, and those of the other routers while this router owns the pool.

    ``name`` is this router's name among the routers. ``send`` sends a message to a router, and ignores a router to
    which there is no connection. ``decided`` receives how each decision of another owner's pool was made, and
    ``owner_changed`` the last and the new owner. ``hash_key`` and ``epoch_s`` are as for ``PoolRouter``.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        name: str,
        send: Callable[[str, Message], None],
        decided: Callable[[RemoteDecision], None] = lambda _: None,
        owner_changed: Callable[[str, str], None] = lambda before, owner: None,
        hash_key: bytes = PUBLIC_KEY,
        replicated: bool = True,
        epoch_s: float = 0.0,
    ) -> None:
        self._router = PoolRouter(pool, replicated=replicated, hash_key=hash_key, epoch_s=epoch_s)
        self._name = name
        self._send = send
        self._decided = decided
        self._owner_changed = owner_changed
        self._election = Election(pool.id, name)
        self._missed_answers = MissedAnswers()
        self._is_ending = False
        # The members' speed, which only the owner knows.
        self._owners_speed = 0.0
        self._endpoints = _endpoints(pool)
        self._requests = OwnRequests()
        self._guests = Guests(self._router, send)
        self._questions = 0

    @property
    def pool(self) -> Pool:
        """The current version of the pool, as ``PoolRouter.pool``."""
        return self._router.pool

    @property
    def departed(self) -> frozenset[str]:
        """Do the same as ``PoolRouter.departed``."""
        return self._router.departed

    @property
    def owner(self) -> str:
        """The router that owns the pool, as far as this router knows."""
        return self._election.owner

    # Requests of this router.

    def on_request(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection | Asked]:
        """Ask the owner about a new request, or decide it if this router is the owner or the owner did not answer."""
        moved: tuple[Outcome, ...] = ()
        if self._election.is_due(now):
            moved = self._elect(now)
        answer, outcomes = self._place(now, request)
        return Effects(answer, moved + outcomes)

    def any_endpoints(self, subset: frozenset[str] | None) -> tuple[str, ...]:
        """Do the same as ``PoolRouter.any_endpoints``."""
        return self._router.any_endpoints(subset)

    def on_served(self, now: float, request_id: str, endpoint: str) -> Effects[bool]:
        """Move a request to the member that served it; the answer is True if that is not the chosen member."""
        request = self._requests.in_flight.get(request_id)
        if request is None:
            return Effects(False)
        elsewhere = endpoint != request.endpoint and endpoint in self._endpoints
        if elsewhere:
            request.endpoint, request.member = endpoint, self._endpoints[endpoint]
        if request.at == self._name:
            return self._delivered(now, self._router.on_served(now, request_id, endpoint))
        if elsewhere:
            self._report(request, Step.SERVED, endpoint=endpoint)
        return Effects(elsewhere)

    def on_heard(self, now: float, request_id: str) -> None:
        """Record a report of a request, which postpones the request's expiry; ignore an unknown request."""
        request = self._requests.heard(now, request_id)
        if request is None:
            return
        if request.at == self._name:
            self._router.on_heard(now, request_id)
        elif now - request.reported_s >= _HEARD_EVERY_S:
            request.reported_s = now
            self._report(request, Step.HEARD)

    def on_first_token(self, now: float, request_id: str) -> Effects[FirstToken | None]:
        """Release a request's pending prefill; the answer is None if the request is unknown or already released."""
        request = self._requests.heard(now, request_id)
        if request is None or request.prefilled:
            return Effects(None)
        request.prefilled = True
        outcomes: tuple[Outcome, ...] = ()
        if request.at == self._name:
            outcomes = self._deliver(now, self._router.on_first_token(now, request_id).outcomes)
        else:
            request.reported_s = now
            self._report(request, Step.FIRST_TOKEN)
        first_token = FirstToken.measured(
            now,
            member=request.member,
            arrived_s=request.request.arrived_s,
            predicted_ttft_s=request.predicted_ttft_s,
            slo_ttft_s=self.pool.slo.ttft_s,
        )
        return Effects(first_token, outcomes)

    def on_finished(self, now: float, request_id: str, usage: Usage | None = None) -> Effects[Completion | None]:
        """End a served request, with the engine's token counts if known; the answer is None for an unknown request."""
        request = self._requests.end(request_id)
        if request is None:
            return Effects(None)
        if request.at == self._name:
            completion, outcomes = self._delivered(now, self._router.on_finished(now, request_id, usage))
            return Effects(completion or request.completion(usage), outcomes)
        self._report(request, Step.FINISHED, usage=usage)
        return Effects(request.completion(usage))

    def on_usage(self, now: float, request_id: str, usage: Usage) -> None:
        """Take the engine's token counts of a request that has ended; ignored when it is unknown."""
        at = self._requests.take_ended(request_id)
        if at is None or at == self._name:
            self._router.on_usage(now, request_id, usage)
        else:
            self._send(at, Progress(request_id=request_id, step=Step.COUNTED, usage=usage))

    def on_aborted(self, now: float, request_id: str) -> Effects[Completion | None]:
        """End a request whose client disconnected; the answer is None if the request is unknown, ended or queued."""
        waiting = self._requests.drop(request_id)
        if waiting is not None:
            if waiting.at == self._name:
                return self._delivered(now, self._router.on_aborted(now, request_id))
            self._send(waiting.at, Progress(request_id=request_id, step=Step.ABORTED))
            return Effects(None)
        return self._interrupted(now, request_id, Step.ABORTED, self._router.on_aborted)

    def on_failed(self, now: float, request_id: str) -> Effects[Completion | None]:
        """End a request that its member failed; the answer is None for an unknown request."""
        return self._interrupted(now, request_id, Step.FAILED, self._router.on_failed)

    # The other routers.

    def on_routers(self, now: float, routers: Collection[str]) -> Effects[None]:
        """Take the names of the routers that may own pools; a new owner gets this router's requests.

        This router may own pools if its name is among them. Without any name, it decides by itself.
        """
        self._election.set_routers(routers)
        return Effects(None, self._elect(now))

    def on_message(self, now: float, peer: str, message: Message) -> Effects[None]:
        """Apply the message of another router."""
        match message:
            case Ask():
                if self._is_ending or self._knows(message.request.id):
                    self._guests.decline(peer, message.request.id, message.number)
                    return Effects(None)
                return Effects(None, self._deliver(now, self._guests.ask(now, peer, message)))
            case Answer():
                self._election.on_answer(peer)
                if peer == self.owner and message.tokens_per_second:
                    self._owners_speed = message.tokens_per_second
                return Effects(None, self._answered(now, peer, message))
            case Declined():
                return Effects(None, self._declined(now, peer, message))
            case Sent():
                if not self._knows(message.request.id):
                    self._guests.take_over(now, peer, message)
                return Effects(None)
            case Progress():
                return Effects(None, self._deliver(now, self._guests.progress(now, peer, message)))
            case Left():
                return Effects(None, self._deliver(now, self._guests.left(now, peer)))

    def on_router_lost(self, now: float, peer: str) -> Effects[None]:
        """Forget a router that has ended, or to which the connection is lost.

        Its requests in flight stay in the accounts, because the members still serve them.
        """
        outcomes = self._guests.lost(now, peer) + self._router.on_peer_lost(now, peer).outcomes
        return Effects(None, self._deliver(now, outcomes))

    def on_orphan(self, now: float, progress: Progress) -> Effects[None]:
        """Apply a report of a request whose router has ended, such as its end; ignore all other requests."""
        return Effects(None, self._deliver(now, self._guests.orphan(now, progress)))

    def stop_asking(self, now: float) -> Effects[None]:
        """Decide all requests by itself from now on, and answer no other router, because this router is about to end.

        The requests that the owner has not decided are decided here. The other routers' queued requests return to their
        routers.
        """
        self._is_ending = True
        outcomes = self._deliver(now, self._guests.decline_queued(now))
        for waiting in tuple(self._requests.waiting.values()):
            if waiting.at != self._name:
                outcomes += self._give_up(now, waiting, "local")
        return Effects(None, outcomes)

    def leave(self, now: float) -> None:
        """Return the other routers' queued requests to their routers, because this router no longer serves the pool.

        The other routers drop this router's requests.
        """
        self._guests.decline_queued(now)
        for router in sorted(self._requests.routers() - {self._name}):
            self._send(router, Left())

    # What other events change.

    def on_pool(self, now: float, pool: Pool) -> Effects[None]:
        """Apply a new version of the pool, as ``PoolRouter.on_pool``."""
        effects = self._delivered(now, self._router.on_pool(now, pool))
        self._endpoints = _endpoints(self.pool)
        return effects

    def on_profile(self, now: float, member: str, profile: EngineProfile) -> Effects[bool]:
        """Apply what a member's engine says, as ``PoolRouter.on_profile``."""
        return self._delivered(now, self._router.on_profile(now, member, profile))

    def on_kv_events(self, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        """Apply what a member's engine reports about its cache, as ``PoolRouter.on_kv_events``."""
        self._router.on_kv_events(member, rank, changes, status)

    def on_update(self, now: float, peer: str, update: ReplicaUpdate, age_s: float) -> Effects[None]:
        """Apply a replication update, as ``PoolRouter.on_update``."""
        return self._delivered(now, self._router.on_update(now, peer, update, age_s))

    def on_bindings(self, now: float, bindings: Sequence[SharedBinding]) -> None:
        """Apply session bindings, as ``PoolRouter.on_bindings``."""
        self._router.on_bindings(now, bindings)

    def take_update(self, now: float) -> ReplicaUpdate:
        """Return the replication update about this router's accounts, as ``PoolRouter.take_update``."""
        return self._router.take_update(now)

    def status(self) -> PoolSnapshot:
        """Return a snapshot of this router's accounts, as ``PoolRouter.status``, with the pool's owner."""
        return replace(self._router.status(), owner=self.owner)

    def demand(self) -> PoolSnapshot:
        """Return a snapshot of this router's own requests: its share of the pool's demand.

        The sum over all routers contains each request once, whichever router accounts for it. Queued requests count as
        requests without a member. While another router owns the pool, the members' speeds are the mean that the owner
        has learnt, because a router that does not decide learns none.
        """
        status = self.status()
        decides = self.owner == self._name
        if decides and not self._guests:
            return status
        return self._requests.demand(status, 0.0 if decides else self._owners_speed)

    def on_deadline(self, now: float) -> Effects[tuple[Completion, ...]]:
        """Run all due work; the answer is the completions of this router's requests that expired without a report."""
        expired, outcomes = self._router.on_deadline(now)
        ended = [each for each in expired if not self._guests.forget(each.request_id)]
        for each in ended:
            self._requests.end(each.request_id)
        released = self._deliver(now, outcomes)
        for waiting in tuple(takewhile(lambda each: _answer_due_s(each) <= now, self._requests.asked.values())):
            self._missed_answers.on_missed(now, asked_s=waiting.asked_s)
            released += self._give_up(now, waiting, "timeout")
        for waiting in tuple(takewhile(lambda each: self._wait_ends_s(each) <= now, self._requests.waiting.values())):
            if waiting.queued and waiting.request.id in self._requests.waiting:
                released += self._reject(now, waiting)
        for request in tuple(
            takewhile(lambda each: each.heard_s + IN_FLIGHT_TTL_S <= now, self._requests.in_flight.values())
        ):
            self._requests.end(request.request.id)
            if request.at == self._name:
                released += self._deliver(now, self._router.hand_over(now, request.request.id).outcomes)
            else:
                self._report(request, Step.ABORTED)
            ended.append(request.completion(None))
        return Effects(tuple(ended), released)

    def next_deadline(self) -> float | None:
        """Return the next time at which ``on_deadline`` must be called, or None."""
        times_s = [self._router.next_deadline()]
        question = next(iter(self._requests.asked.values()), None)
        if question is not None:
            times_s.append(_answer_due_s(question))
        first = next(iter(self._requests.waiting.values()), None)
        if first is not None and first.queued:
            times_s.append(self._wait_ends_s(first))
        request = next(iter(self._requests.in_flight.values()), None)
        if request is not None:
            times_s.append(request.heard_s + IN_FLIGHT_TTL_S)
        return min((each for each in times_s if each is not None), default=None)

    def _place(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection | Asked]:
        if self.owner == self._name or self._is_ending:
            return self._decide(now, request)
        if self._missed_answers.is_paused(now):
            self._decided(RemoteDecision("local", 0.0))
            return self._decide(now, request)
        self._ask(now, Waiting(request=request, at=self.owner, since_s=now, asked_s=now))
        return Effects(Asked(request_id=request.id))

    def _elect(self, now: float) -> tuple[Outcome, ...]:
        """Find the pool's owner; if it is another one than before, move this router's requests to its accounts."""
        before = self.owner
        if not self._election.update(now):
            return ()
        self._owner_changed(before, self.owner)
        if self._is_ending:
            return ()
        self._missed_answers.reset()
        if self.owner != self._name:
            # A router that was lost and returns still accounts for requests that have ended meanwhile.
            self._send(self.owner, Left())
        return self._move(now)

    def _declined(self, now: float, peer: str, declined: Declined) -> tuple[Outcome, ...]:
        """Look for another owner, because a router does not decide the pool's requests; decide here if there is none.

        Routers that watch different namespaces know each other, but do not serve the same pools.
        """
        waiting = self._requests.waiting.get(declined.request_id)
        if waiting is None or waiting.at != peer or waiting.number != declined.number:
            return ()
        self._election.on_declined(now, peer)
        outcomes: tuple[Outcome, ...] = ()
        if peer != self.owner or self._election.possible_owner() == self._name:
            outcomes = self._give_up(now, waiting, "refused")
        return outcomes + self._elect(now)

    # Questions to the owner.

    def _ask(self, now: float, waiting: Waiting) -> None:
        """Ask the owner about a request."""
        request = waiting.request
        self._requests.ask(now, waiting, self.owner)
        self._questions += 1
        waiting.number = self._questions
        self._router.compute_chains(request)
        self._send(self.owner, Ask(request=request, age_s=now - request.arrived_s, number=waiting.number))

    def _answered(self, now: float, peer: str, answer: Answer) -> tuple[Outcome, ...]:
        outcome = answer.outcome
        waiting = self._requests.waiting.get(outcome.request_id)
        if waiting is None or waiting.at != peer or waiting.number != answer.number:
            # The request was aborted, decided by this router, or asked again. The peer has a message about it.
            return ()
        if outcome.request_id in self._requests.asked:
            self._decided(RemoteDecision("answered", now - waiting.asked_s))
        moved: tuple[Outcome, ...] = ()
        if peer == self.owner and self._missed_answers.reset():
            # The owner answers again, so it gets the requests that were decided here meanwhile.
            moved = self._move(now)
        if isinstance(outcome, Decision):
            # The routers may have different versions of the pool, and Envoy may have this router's.
            known = tuple(each for each in outcome.endpoints if each in self._endpoints)
            if known[:1] != outcome.endpoints[:1]:
                return moved + self._give_up(now, waiting, "refused")
            outcome = outcome._replace(endpoints=known)
        return moved + self._requests.on_outcome(now, waiting, outcome)

    def _give_up(self, now: float, waiting: Waiting, result: str) -> tuple[Outcome, ...]:
        """Decide a request here that another router was asked about."""
        if waiting.request.id in self._requests.asked:
            self._decided(RemoteDecision(result, now - waiting.asked_s))
        self._send(waiting.at, Progress(request_id=waiting.request.id, step=Step.ABORTED))
        return self._decide_again(now, waiting)

    def _reject(self, now: float, waiting: Waiting) -> tuple[Outcome, ...]:
        """Reject a request that was queued for the pool's longest wait, whichever router queued it last."""
        self._requests.drop(waiting.request.id)
        if waiting.at != self._name:
            self._send(waiting.at, Progress(request_id=waiting.request.id, step=Step.ABORTED))
        rejection, outcomes = self._delivered(now, self._router.on_overdue(now, waiting.request))
        return (rejection, *outcomes)

    def _decide(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection | Asked]:
        """Decide a new request of this router here."""
        answer, outcomes = self._router.on_request(now, request)
        waiting = Waiting(request=request, at=self._name, since_s=now, asked_s=now)
        self._requests.on_outcome(now, waiting, answer)
        return Effects(answer, self._deliver(now, outcomes))

    def _decide_again(self, now: float, waiting: Waiting) -> tuple[Outcome, ...]:
        """Decide a request here that another router did not decide."""
        waiting.at = self._name
        answer, outcomes = self._router.on_request(now, waiting.request)
        return self._requests.on_outcome(now, waiting, answer) + self._deliver(now, outcomes)

    def _knows(self, request_id: str) -> bool:
        return request_id in self._guests or request_id in self._requests

    # The accounts of this router's requests.

    def _move(self, now: float) -> tuple[Outcome, ...]:
        """Move all requests of this router to the owner's accounts."""
        outcomes: tuple[Outcome, ...] = ()
        if self.owner != self._name:
            for request_id in self._requests.at(self._name):
                outcomes += self._delivered(now, self._router.hand_over(now, request_id)).outcomes
        for router in sorted(self._requests.routers() - {self._name, self.owner}):
            self._send(router, Left())
        for request in self._requests.in_flight.values():
            if request.at != self.owner:
                request.at = self.owner
                self._hand_over(now, request)
        for waiting in tuple(self._requests.waiting.values()):
            if waiting.at == self.owner:
                continue
            if self.owner == self._name:
                outcomes += self._decide_again(now, waiting)
            else:
                self._ask(now, waiting)
        return outcomes

    def _hand_over(self, now: float, request: InFlight) -> None:
        if request.at == self._name:
            self._router.take_over(now, request.sent())
        else:
            self._router.compute_chains(request.request)
            self._send(request.at, Sent.of(now, request.sent()))

    def _delivered(self, now: float, effects: Effects[AnswerT]) -> Effects[AnswerT]:
        return Effects(effects.answer, self._deliver(now, effects.outcomes))

    def _deliver(self, now: float, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Send the outcomes of other routers' requests to their routers; return those of this router's."""
        own: tuple[Outcome, ...] = ()
        for outcome in self._guests.answer(now, outcomes):
            waiting = self._requests.waiting.get(outcome.request_id)
            if waiting is not None:
                own += self._requests.on_outcome(now, waiting, outcome)
        return own

    def _interrupted(
        self, now: float, request_id: str, step: Step, end: Callable[[float, str], Effects[Completion | None]]
    ) -> Effects[Completion | None]:
        request = self._requests.end(request_id)
        if request is None:
            return Effects(None)
        if request.at == self._name:
            completion, outcomes = self._delivered(now, end(now, request_id))
            return Effects(completion or request.completion(None), outcomes)
        self._report(request, step)
        return Effects(request.completion(None))

    def _report(self, request: InFlight, step: Step, *, endpoint: str = "", usage: Usage | None = None) -> None:
        self._send(request.at, Progress(request_id=request.request.id, step=step, endpoint=endpoint, usage=usage))

    def _wait_ends_s(self, waiting: Waiting) -> float:
        return waiting.since_s + self.pool.routing.queue.max_wait_s


Router = PoolRouter | SharedRouter
"""A pool's router, alone or among others."""


def _answer_due_s(question: Waiting) -> float:
    return question.asked_s + ANSWER_TIMEOUT_S


def _endpoints(pool: Pool) -> dict[str, str]:
    """Return the ids of a pool's members by endpoint."""
    return {member.endpoint: member.id for member in pool.members}
