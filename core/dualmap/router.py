"""One pool's router: a synchronous object without I/O that returns a decision for each request.

Each event is a method call with ``now`` (monotonic seconds). An event that may release queued requests returns its
effects: the answer to the event, and the outcomes of the released requests. The driver must call ``on_deadline`` at the
time that ``next_deadline`` returns. The gRPC server calls the router with the event loop's clock, the simulator with
virtual time.

The router consists of a chooser, a dispatcher and a fleet (docs/architecture.md). The chooser finds a request's member:
hotness determines the key, the rings determine the pair, the fleet describes the candidates, and the policy chooses.
The dispatcher sends the request to the chosen member, or queues the request while the member is saturated.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualmap.chooser import Chooser
from dualmap.dispatcher import Dispatcher
from dualmap.engines.profile import EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceStatus
from dualmap.fleet.fleet import Fleet
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap.replicas.load_reports import LoadReports
from dualmap.replicas.update import ReplicaUpdate, SharedBinding
from dualmap.requests import (
    Completion,
    Decision,
    Effects,
    FirstToken,
    Outcome,
    PoolSnapshot,
    Queued,
    Rejection,
    Request,
    SentRequest,
    Usage,
)


class PoolRouter:
    """Routes the requests of one pool and records the progress of its members' requests.

    If ``replicated`` is true, the router stores the data of ``take_update`` for other replicas. ``hash_key`` is the key
    of the hashes of prompts. ``epoch_s`` is the time since the epoch at which ``now`` is 0, because members leave at
    times since the epoch.
    """

    def __init__(
        self, pool: Pool, *, replicated: bool = False, hash_key: bytes = PUBLIC_KEY, epoch_s: float = 0.0
    ) -> None:
        self._pool = pool
        self._fleet = Fleet(pool, hash_key, epoch_s=epoch_s)
        self._chooser = Chooser(pool, self._fleet.candidates, replicated=replicated)
        self._dispatcher = Dispatcher(pool, self._fleet, self._chooser, replicated=replicated)
        self._load_reports = LoadReports()
        self._bodiless_sequence = 0

    @property
    def pool(self) -> Pool:
        """The current version of the pool; its engines' profiles fill the values that the specification leaves open."""
        return self._pool

    def on_request(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection]:
        """Choose the member of a new request; dispatch, queue or reject the request."""
        moved = self._resume(now)
        request = self._chooser.with_pull(now, self._fleet.recounted(request))
        effects = self._dispatcher.place(now, request)
        return Effects(effects.answer, moved + effects.outcomes) if moved else effects

    def any_endpoints(self, subset: frozenset[str] | None) -> tuple[str, ...]:
        """Return up to two endpoints for a request without a prompt, round-robin; empty if no member may be picked."""
        ring, preferred = self._fleet.candidates.rings_of_model(subset, self._pool.model.name)
        members = (ring if preferred is None else preferred).members
        turn = self._bodiless_sequence
        self._bodiless_sequence += 1
        return tuple(members[(turn + step) % len(members)].endpoint for step in range(min(2, len(members))))

    def on_served(self, now: float, request_id: str, endpoint: str) -> Effects[bool]:
        """Move a request to the member that served it; the answer is True if that is not the chosen member."""
        served = self._fleet.served(now, request_id, endpoint)
        if served is None:
            return Effects(False)
        request, left = served
        self._chooser.bind(now, request)
        # Envoy uses another member only if it cannot connect to the chosen member.
        outcomes = self._on_failure(now, left, request.dispatched_s)
        return Effects(True, outcomes + self._dispatcher.release(now, left))

    def on_heard(self, now: float, request_id: str) -> None:
        """Record a report of a request, which postpones the request's expiry; ignore an unknown request."""
        self._fleet.heard(now, request_id)

    def on_first_token(self, now: float, request_id: str) -> Effects[FirstToken | None]:
        """Release a request's pending prefill; the answer is None if the request is unknown or already released."""
        request = self._fleet.first_token(now, request_id)
        if request is None:
            return Effects(None)
        first_token = FirstToken.measured(
            now,
            member=request.member,
            arrived_s=request.arrived_s,
            predicted_ttft_s=request.predicted_ttft_s,
            slo_ttft_s=self._pool.slo.ttft_s,
        )
        return Effects(first_token, self._dispatcher.release(now, request.member))

    def on_finished(self, now: float, request_id: str, usage: Usage | None = None) -> Effects[Completion | None]:
        """End a served request, with the engine's token counts if known; the answer is None for an unknown request."""
        request = self._fleet.finished(now, request_id, usage)
        if request is None:
            return Effects(None)
        return Effects(request.completion(usage), self._dispatcher.release(now, request.member))

    def on_usage(self, now: float, request_id: str, usage: Usage) -> None:
        """Take the engine's token counts of a request that has ended; ignored when it is unknown."""
        self._fleet.measured(now, request_id, usage)

    def on_aborted(self, now: float, request_id: str) -> Effects[Completion | None]:
        """End a request whose client disconnected; the answer is None if the request is unknown, ended or queued."""
        was_queued, outcomes = self._dispatcher.forget(now, request_id)
        if was_queued:
            return Effects(None, outcomes)
        request = self._fleet.interrupted(now, request_id)
        return Effects(None) if request is None else self._completed(now, request)

    def on_failed(self, now: float, request_id: str) -> Effects[Completion | None]:
        """End a request that its member failed; the answer is None for an unknown request.

        Several consecutive failures suspend the member.
        """
        request = self._fleet.interrupted(now, request_id)
        if request is None:
            return Effects(None)
        outcomes = self._on_failure(now, request.member, request.dispatched_s)
        completion, released = self._completed(now, request)
        return Effects(completion, outcomes + released)

    def compute_chains(self, request: Request) -> None:
        """Compute the chains of a request's token ids that this pool's engines need, for another router."""
        if request.tokens is not None:
            self._fleet.compute_chains(request.tokens)

    def take_over(self, now: float, sent: SentRequest) -> bool:
        """Record a request in flight that another router decided; False for an unknown endpoint or a known request."""
        return self._fleet.take_over(now, sent)

    def is_queued(self, request_id: str) -> bool:
        """Return whether a request is queued."""
        return self._dispatcher.is_queued(request_id)

    def hand_over(self, now: float, request_id: str) -> Effects[None]:
        """Drop a request, queued or in flight, because another router accounts for it from now on."""
        was_queued, outcomes = self._dispatcher.forget(now, request_id)
        if not was_queued:
            member = self._fleet.hand_over(now, request_id)
            if member is not None:
                outcomes += self._dispatcher.release(now, member)
        return Effects(None, outcomes)

    def on_overdue(self, now: float, request: Request) -> Effects[Rejection]:
        """Reject a request that was queued here, or by other routers, for the pool's longest wait."""
        _, outcomes = self._dispatcher.forget(now, request.id)
        return Effects(self._dispatcher.overdue(request), outcomes)

    def on_peer_lost(self, now: float, peer: str) -> Effects[None]:
        """Remove the load that a replica reported which has ended, or to which the connection is lost."""
        self._fleet.forget_peer(peer)
        return Effects(None, self._dispatcher.release_all(now))

    def on_pool(self, now: float, pool: Pool) -> Effects[None]:
        """Apply a new version of the pool: members join, change and leave; requests in flight stay recorded."""
        assert pool.id == self._pool.id, f"router of {self._pool.id} was given {pool.id}"
        self._fleet.specify(pool)
        outcomes = self._adopt_pool(now, self._fleet.completed())
        return Effects(None, outcomes + self._dispatcher.release_all(now))

    def on_profile(self, now: float, member: str, profile: EngineProfile) -> Effects[bool]:
        """Apply what a member's engine says; the answer is whether the router's ``pool`` has changed.

        An unknown member's profile is ignored.
        """
        change = self._fleet.on_profile(now, member, profile)
        if not change.facts and not change.ring:
            return Effects(False, self._dispatcher.release(now, member) if change.load else ())
        outcomes: tuple[Outcome, ...] = ()
        completed = self._fleet.completed() if change.facts else self._pool
        changed = completed != self._pool
        if changed:
            outcomes = self._adopt_pool(now, completed)
        elif change.ring:
            outcomes = self._dispatcher.requeue(now, self._fleet.members)
        return Effects(changed, outcomes + self._dispatcher.release_all(now))

    def on_kv_events(self, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        """Apply what a rank of a member's engine reports about its cache, in order; ignore an unknown member.

        The report changes no load, so it releases no queued request.
        """
        self._fleet.on_kv_events(member, rank, changes, status)

    def on_deadline(self, now: float) -> Effects[tuple[Completion, ...]]:
        """Run all due work; the answer is the completions of requests that expired without a report."""
        completions: list[Completion] = []
        outcomes: tuple[Outcome, ...] = ()
        for request in self._fleet.expire(now):
            completion, released = self._completed(now, request)
            completions.append(completion)
            outcomes += released
        self._fleet.expire_others(now)
        outcomes += self._resume(now)
        outcomes += self._dispatcher.release_all(now) + self._dispatcher.expire(now)
        return Effects(tuple(completions), outcomes)

    def next_deadline(self) -> float | None:
        """Return the next time at which ``on_deadline`` must be called, or None."""
        deadlines = (self._fleet.next_deadline(), self._dispatcher.next_deadline())
        return min((each for each in deadlines if each is not None), default=None)

    def take_update(self, now: float) -> ReplicaUpdate:
        """Return the replication update for the other replicas: the changes in this replica since the last update.

        The update contains the loads if they have changed, and at least every KEEP_ALIVE_S.
        """
        return ReplicaUpdate(
            hotness=self._chooser.tree.take_counts(),
            loads=self._load_reports.due(now, self._fleet.own_loads(now)),
            placements=self._dispatcher.take_placements(),
            bindings=self._chooser.sessions.take_changes(now),
            wanted=self._chooser.sessions.take_wanted(),
        )

    def on_update(self, now: float, peer: str, update: ReplicaUpdate, age_s: float) -> Effects[None]:
        """Apply the replication update that another replica created ``age_s`` ago."""
        said_s = now - age_s
        if update.loads is not None:
            self._fleet.on_loads(said_s, peer, update.loads, age_s=age_s)
        self._chooser.tree.merge(said_s, update.hotness)
        for placement in update.placements:
            self._fleet.on_placement(now, said_s, placement)
        self._adopt(said_s, update.bindings, hinted=False)
        # Placements and counts change no load, so they release no queued request.
        return Effects(None, () if update.loads is None else self._dispatcher.release_all(now))

    def on_bindings(self, now: float, bindings: Sequence[SharedBinding]) -> None:
        """Apply session bindings from the store if their version is higher or this replica requested them."""
        self._adopt(now, bindings, hinted=True)

    @property
    def departed(self) -> frozenset[str]:
        """The members whose time to leave has passed."""
        return self._fleet.departed

    def solo_tokens_per_second(self) -> float:
        """Return the members' mean prefill speed without other routers' prefills; 0 without members."""
        return self._fleet.solo_tokens_per_second()

    def status(self) -> PoolSnapshot:
        """Return a snapshot of the pool's state in this router."""
        return PoolSnapshot(
            pool=self._pool.id,
            ring_version=self._pool.ring_version,
            held=self._dispatcher.queued,
            unplaced_prefill_tokens=self._dispatcher.unplaced_tokens,
            sessions=len(self._chooser.sessions),
            peers=self._fleet.replicas,
            endpoints=self._fleet.statuses(),
            hotness_nodes=self._chooser.tree.nodes,
            split_prefixes=self._chooser.tree.split_prefixes,
            shadows=self._dispatcher.shadows,
        )

    def _adopt_pool(self, now: float, pool: Pool) -> tuple[Outcome, ...]:
        """Use a new version of the pool; return the outcomes of queued requests whose member left or restarted."""
        self._pool = pool
        self._chooser.adopt(pool)
        self._dispatcher.adopt(pool)
        outcomes = self._dispatcher.requeue(now, self._fleet.adopt(now, pool))
        self._fleet.forget_gone()
        return outcomes

    def _adopt(self, now: float, bindings: Sequence[SharedBinding], *, hinted: bool) -> None:
        longest = self._pool.engine.max_model_len
        for binding in bindings:
            plausible = binding if binding.tokens <= longest else replace(binding, tokens=longest)
            self._chooser.sessions.adopt(now, plausible, hinted=hinted)

    def _resume(self, now: float) -> tuple[Outcome, ...]:
        """Apply the end of suspensions; choose new members for the queued requests of members that have left."""
        return self._dispatcher.requeue(now, self._fleet.members) if self._fleet.resume(now) else ()

    def _on_failure(self, now: float, member: str, dispatched_s: float) -> tuple[Outcome, ...]:
        """Count a failure of a member; if the member is now suspended, choose new members for its queued requests."""
        if self._fleet.failed(now, member, dispatched_s):
            return self._dispatcher.requeue(now, self._fleet.members)
        return ()

    def _completed(self, now: float, request: InFlightRequest) -> Effects[Completion]:
        """Return the completion of a failed request and the outcomes of the queued requests that its end released."""
        return Effects(request.completion(None), self._dispatcher.release(now, request.member))
