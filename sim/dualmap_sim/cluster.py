"""A cluster in virtual time: routers, engines and the messages between them, as discrete events on a timeline.

The routers are core's ``PoolRouter`` and the engines are ``engine.Engine``: the same classes serve in wall-clock time.
This module drives routers and engines in the same way as the router's ``request/`` and ``engine_driver.py``. Reports
are late as in production. First tokens and completions reach a router after ``feedback_delay_s``, or are lost. Updates
of other routers arrive after the replication period and delay. Equal configurations and arrivals give equal records on
any machine.

``arrivals`` makes the requests, ``records`` holds the results, and ``summary`` computes the figures. ``instances``,
``replication`` and ``events`` are components of this module. An ``observer`` may observe and change the pool.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from xxhash import xxh3_64_intdigest

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import TOKEN_BYTES, token_root
from dualmap.kv_store.view import NO_MATCH
from dualmap.ownership.messages import Progress, Step
from dualmap.pools.pool import Pool
from dualmap.requests import Asked, Outcome, Queued, Rejection, Request, Usage
from dualmap.router import PoolRouter
from dualmap.shared_router import Router
from dualmap_sim.arrivals import Arrival
from dualmap_sim.block_pool import EventBatch, stand_in_tokens
from dualmap_sim.continuations import Continuations
from dualmap_sim.decoders import Decoders, DecodeSide
from dualmap_sim.discovery import LOAD_EVERY_S, profile_of
from dualmap_sim.engine import EngineRequest, Finished, FirstToken
from dualmap_sim.events import Bypass, Event, Fail, Forget, PoolChange, Recover
from dualmap_sim.instances import Instance, Instances
from dualmap_sim.kv_subscriptions import KvSubscriptions
from dualmap_sim.messages import RouterMessages
from dualmap_sim.observer import ClusterObserver
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import LoadSample, Record
from dualmap_sim.replication import Replica, Replication, ReplicationConfig, everything
from dualmap_sim.shared_store import SharedStore
from dualmap_sim.timeline import Timeline

__all__ = ["Cluster", "ClusterConfig", "LoadSample", "Record", "Replica", "ReplicationConfig", "everything"]

_TWO_64: Final = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The settings of a run: a pool with an engine for every member, the routers, and the events.

    Without an ``exchange`` the routers share no state. Each router receives an equal share of the requests. The request
    id determines the router.
    """

    pool: Pool
    engine: EngineConfig
    engines: Mapping[str, EngineConfig] = field(default_factory=dict)
    """Engines that differ from ``engine``, by member id."""
    events: tuple[Event, ...] = ()
    replicas: tuple[Replica, ...] = (Replica(),)
    exchange: ReplicationConfig | None = None
    hop_delay_s: float | None = None
    """Delay of a message between two routers, if the pool's owner decides. None: each router decides by itself."""
    late_hops: float = 0.0
    """Share (0 to 1) of the messages between routers that arrive later than a router waits for an answer."""
    feedback_delay_s: float = 0.0
    """Delay until a router receives a first token, a completion or a failed connection."""
    report_loss: float = 0.0
    """Share (0 to 1) of first tokens and completions that are never reported. The request id determines the loss."""
    kv_moves: bool = False
    """Whether an engine may pull a session's KV from the engine of the session's last request."""
    continues: bool = False
    """Whether a stream that its engine cuts continues at the second endpoint of its pick (``continuations.py``)."""
    discovery: bool = False
    """Whether the routers ask every engine once a second for its memory and load, as they do by default."""
    sample_s: float | None = None
    """Seconds between two samples of the load; None takes no samples."""
    gives_up: Callable[[Record], bool] | None = None
    """A function that the run calls at each first token, rejection and failure. If it returns True, the run ends."""
    reports_cached_tokens: bool = True
    """Whether engines report the cached tokens of a request at its end. Each record has them anyway."""
    kv_events_delay_s: float = 0.001
    """Delay until the routers receive KV events, if the pool enables these."""
    on_kv_events: Callable[[str, EventBatch], None] | None = None
    """A function that receives a member's id and the KV events of a step of its engine, as they occur.

    With this function, or if the pool enables KV events, the engines have physical blocks (``block_pool.py``). A
    recovered engine begins at number 0.
    """
    lasts_s: float = 0.0
    """The minimum duration of a run, even without requests."""
    decode_side: DecodeSide | None = None
    """The decode-only engines of a static prefill/decode split. The members' engines then must not decode."""


class Cluster:
    """One run, with an optional ``observer``. Callers may read ``routers`` and ``samples`` afterwards."""

    def __init__(self, config: ClusterConfig, *, observer: ClusterObserver | None = None) -> None:
        self._config = config
        self._observer = observer
        self.samples: list[LoadSample] = []
        self.gave_up = False
        """Whether ``gives_up`` ended the run."""
        self._timeline = Timeline()
        replicated = config.exchange is not None
        self._messages: RouterMessages | None = None
        if config.hop_delay_s is not None:
            self._messages = RouterMessages(
                config.pool,
                replicas=config.replicas,
                hop_delay_s=config.hop_delay_s,
                late=config.late_hops,
                replicated=replicated,
                timeline=self._timeline,
                after=self._after,
            )
        alone = (PoolRouter(config.pool, replicated=replicated) for _ in config.replicas)
        self.routers: tuple[Router, ...] = tuple(alone) if self._messages is None else self._messages.routers
        self._subscriptions: KvSubscriptions | None = None
        if config.pool.engine.kv_events.enabled:
            self._subscriptions = KvSubscriptions(self.routers, self._timeline, delay_s=config.kv_events_delay_s)
        self._has_kv_events = self._subscriptions is not None or config.on_kv_events is not None
        self._instances = Instances(
            config.pool, engine=config.engine, engines=config.engines, kv_events=self._has_kv_events
        )
        self._store: SharedStore | None = None
        if config.pool.kv_store.is_used:
            min_tokens = config.pool.kv_store.min_tokens
            self._store = SharedStore(block_tokens=config.engine.block_tokens, min_tokens=min_tokens)
        self._decoders: Decoders | None = None
        if config.decode_side is not None:
            self._decoders = Decoders(
                config.decode_side, timeline=self._timeline, first_token=self._note_answer, finished=self._note_end
            )
        self._continuations = Continuations() if config.continues else None
        self._token_root = token_root(model=config.pool.model.name)
        self._replication: Replication | None = None
        self._records: dict[str, Record] = {}
        # Number of requests that are not over, including the next arrival, plus one until the run's minimum duration
        # has passed.
        self._open = 0
        self._arrivals: Iterator[Arrival] = iter(())
        self._followers: dict[str, list[Arrival]] = {}
        # The engine of each session's last request.
        self._hosts: dict[int, Instance] = {}
        # The time of each router's next wake-up. Wake-ups scheduled for other times have no effect.
        self._router_wakes_s = [inf] * len(self.routers)

    def run(self, arrivals: Sequence[Arrival]) -> tuple[Record, ...]:
        """Replay the requests until the last has ended; return a record of each, in order of arrival.

        ``arrivals`` are in order of ``at_s``. A request that follows another request arrives ``pause_s`` after the end
        of the earlier request. A rejection or a failure is also an end, because a client continues after any answer.
        """
        for arrival in arrivals:
            if arrival.follows is not None:
                self._followers.setdefault(arrival.follows, []).append(arrival)
        self._arrivals = (arrival for arrival in arrivals if arrival.follows is None)
        self._next_arrival()
        if self._config.lasts_s:
            self._open += 1
            self._timeline.at(self._config.lasts_s, self._has_lasted, self._config)
        if self._observer is not None:
            self._observer.begin(self._timeline, self.routers, self._publish)
        for event in self._config.events:
            self._timeline.at(event.at_s, self._happen, event)
        for number, replica in enumerate(self._config.replicas):
            if replica.lost_s < inf:
                self._timeline.at(replica.lost_s, self._lose_router, number, ticks=True)
        if self._messages is not None:
            self._messages.begin()
        if self._config.exchange is not None:
            self._replication = Replication(
                self._config.exchange,
                replicas=self._config.replicas,
                routers=self.routers,
                timeline=self._timeline,
                after=self._after_update,
            )
            self._replication.begin()
        if self._config.discovery:
            self._timeline.at(0.0, self._discover, self._config, ticks=True)
        if self._config.sample_s is not None:
            self._timeline.at(0.0, self._sample, self._config.sample_s, ticks=True)
        while self._open and not self.gave_up:
            assert not self._timeline.is_over, f"{self._open} requests never end"
            self._timeline.step()
        assert self.gave_up or not self._followers, "a request follows one that never came"
        return tuple(self._records.values())

    def _has_lasted(self, _config: ClusterConfig) -> None:
        self._open -= 1

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._open += 1
            self._timeline.at(arrival.at_s, self._arrive_next, arrival)

    def _arrive_next(self, arrival: Arrival) -> None:
        self._next_arrival()
        self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        now, request_id = self._timeline.now_s, arrival.work.request_id
        router = self._router_of(now, request_id)
        assert request_id not in self._records, f"two requests are called {request_id}"
        self._records[request_id] = Record(arrival=arrival, router=router)
        request = Request(
            id=request_id,
            chain=arrival.chain,
            arrived_s=now,
            session=arrival.session,
            client=arrival.client,
            tokens=None if self._subscriptions is None else self._tokens(arrival.work),
            stored=NO_MATCH
            if self._store is None
            else self._store.match(self._full_blocks(arrival.work), arrival.work.prompt_tokens),
        )
        effects = self.routers[router].on_request(now, request)
        self._decided(effects.answer)
        self._after(router, effects.outcomes)

    def _full_blocks(self, work: EngineRequest) -> Sequence[int]:
        return work.blocks[: work.prompt_tokens // self._config.engine.block_tokens]

    def _tokens(self, work: EngineRequest) -> PromptTokens:
        """Return the token ids of a prompt, which are those of the events of its blocks."""
        packed = stand_in_tokens(work.blocks, block_tokens=self._config.engine.block_tokens)
        return PromptTokens(packed[: work.prompt_tokens * TOKEN_BYTES], root=self._token_root)

    def _router_of(self, now: float, request_id: str) -> int:
        if len(self.routers) == 1:
            return 0
        present = [number for number, replica in enumerate(self._config.replicas) if replica.runs(now)]
        return present[xxh3_64_intdigest(b"share " + request_id.encode()) % len(present)]

    def _decided(self, outcome: Outcome | Asked) -> None:
        if isinstance(outcome, Asked):
            return
        record = self._records[outcome.request_id]
        assert record.dispatched_s is None, f"{outcome.request_id} was dispatched twice"
        assert record.refused is None, f"{outcome.request_id} was refused before"
        if isinstance(outcome, Queued):
            record.held = True
            if self._observer is not None:
                self._observer.held(self._timeline.now_s, record.router)
        elif isinstance(outcome, Rejection):
            record.refused = outcome.reason
            self._open -= 1
            if self._observer is not None:
                self._observer.refused(self._timeline.now_s, record.router)
            self._may_give_up(record)
            self._ended(record)
        else:
            record.dispatched_s = self._timeline.now_s
            record.endpoint = outcome.endpoints[0]
            record.rule = outcome.receipt.rule
            if self._continuations is not None:
                self._continuations.picked(outcome.request_id, outcome.endpoints)
            if self._observer is not None:
                self._observer.routed(self._timeline.now_s, record.router, outcome.receipt)
            self._hand_over(record, self._instances.at(record.endpoint))

    def _hand_over(self, record: Record, instance: Instance) -> None:
        now = self._timeline.now_s
        if not instance.alive:
            self._timeline.at(now + self._config.feedback_delay_s, self._fail, record)
            return
        work = record.arrival.work
        if self._config.kv_moves and record.arrival.session is not None:
            work = self._with_pull(work, record.arrival.session, instance)
        self._submit(instance, work)

    def _submit(self, instance: Instance, work: EngineRequest) -> None:
        if self._store is not None:
            work = replace(work, pulled_tokens=self._store.tokens(self._full_blocks(work)))
        instance.submit(self._timeline.now_s, work, weighed=self._config.sample_s is not None)
        self._wake_engine(instance)

    def _with_pull(self, work: EngineRequest, session: int, to: Instance) -> EngineRequest:
        """Pull the KV of a session from the engine of its last request, if the new engine is another engine."""
        host = self._hosts.get(session)
        self._hosts[session] = to
        if host is None or host is to or not host.alive or to.engine.config.pull_tokens_per_s is None:
            return work
        return replace(work, pulled_tokens=host.engine.cached_tokens(work))

    def _ended(self, record: Record) -> None:
        """Schedule the requests that follow the ended request."""
        for follower in self._followers.pop(record.arrival.work.request_id, ()):
            at_s = self._timeline.now_s + follower.pause_s
            self._open += 1
            self._timeline.at(at_s, self._arrive, replace(follower, at_s=at_s))

    def _may_give_up(self, record: Record) -> None:
        gives_up = self._config.gives_up
        if gives_up is not None and gives_up(record):
            self.gave_up = True

    def _after(self, router: int, outcomes: tuple[Outcome, ...] = ()) -> None:
        """Apply an event's decisions on queued requests; schedule the router's next update and deadline."""
        if self._replication is not None:
            self._replication.changed(router)
        self._apply(router, outcomes)

    def _after_update(self, router: int, outcomes: tuple[Outcome, ...]) -> None:
        """Apply the decisions after another router's update, which alone causes no update of this router."""
        if outcomes:
            self._after(router, outcomes)
        else:
            self._apply(router, ())

    def _apply(self, router: int, outcomes: tuple[Outcome, ...]) -> None:
        """Apply a router's decisions on queued requests, and schedule the router's next deadline."""
        if not self._runs(router):
            return
        for outcome in outcomes:
            self._decided(outcome)
        due_s = self.routers[router].next_deadline()
        if due_s is not None and due_s < self._router_wakes_s[router]:
            due_s = max(due_s, self._timeline.now_s)
            if due_s < self._router_wakes_s[router]:
                self._router_wakes_s[router] = due_s
                self._timeline.at(due_s, self._router_due, router)

    def _router_due(self, router: int) -> None:
        now = self._timeline.now_s
        if self._router_wakes_s[router] != now:
            return
        self._router_wakes_s[router] = inf
        deadline_s = self.routers[router].next_deadline()
        if deadline_s is not None and deadline_s <= now:
            self._after(router, self.routers[router].on_deadline(now).outcomes)
        else:
            self._after(router)

    def _wake_engine(self, instance: Instance) -> None:
        due_s = instance.engine.next_event_s()
        if due_s is not None and due_s != instance.wakes_s:
            instance.wakes_s = due_s
            self._timeline.at(due_s, self._engine_due, instance)

    def _engine_due(self, instance: Instance) -> None:
        if instance.wakes_s != self._timeline.now_s:
            return
        instance.wakes_s = inf
        self._advance(instance)
        self._wake_engine(instance)

    def _advance(self, instance: Instance) -> None:
        now, report_s = self._timeline.now_s, self._timeline.now_s + self._config.feedback_delay_s
        events = instance.engine.advance(now)
        self._publish_kv_events(instance)
        for event in events:
            record = self._records[event.request_id]
            if isinstance(event, FirstToken):
                instance.prefilled(event.request_id)
                if self._continuations is not None and record.continued:
                    self._continuations.went_on(record, event)
                    continue
                self._note_prefill(record, event)
                if not self._is_lost(b"first ", event.request_id):
                    self._timeline.at(report_s, self._hear_first_token, record)
            else:
                if self._decoders is None:
                    self._note_end(event)
                else:
                    self._open += 1  # The request is over when its decode has ended, too.
                    self._decoders.submit(event.at_s, record.arrival.work)
                instance.ended(event.request_id)
                if self._is_lost(b"end ", event.request_id):
                    self._open -= 1
                else:
                    self._timeline.at(report_s, self._hear_end, record)

    def _publish_kv_events(self, instance: Instance) -> None:
        if self._has_kv_events:
            for batch in instance.engine.take_event_batches():
                if self._subscriptions is not None:
                    self._subscriptions.publish(instance.member, batch)
                if self._config.on_kv_events is not None:
                    self._config.on_kv_events(instance.member, batch)

    def _is_lost(self, kind: bytes, request_id: str) -> bool:
        loss = self._config.report_loss
        return loss > 0.0 and xxh3_64_intdigest(kind + request_id.encode()) < loss * _TWO_64

    def _note_prefill(self, record: Record, event: FirstToken) -> None:
        assert record.prefilled_s is None, f"{event.request_id} was prefilled twice"
        record.prefilled_s = event.at_s
        record.cached_tokens, record.pulled_tokens = event.cached_tokens, event.pulled_tokens
        if self._continuations is not None:
            self._continuations.began(event)
        if self._store is not None and record.endpoint is not None:
            host = record.endpoint.rpartition(":")[0]
            self._store.put(host, self._full_blocks(record.arrival.work))
        if self._decoders is None:
            self._note_answer(event)

    def _note_answer(self, event: FirstToken) -> None:
        record = self._records[event.request_id]
        record.first_token_s = event.at_s
        self._may_give_up(record)

    def _note_end(self, event: Finished) -> None:
        record = self._records[event.request_id]
        assert record.finished_s is None, f"{event.request_id} finished twice"
        assert not record.failed, f"{event.request_id} finished after it had failed"
        record.finished_s = event.at_s
        if self._decoders is not None:
            self._open -= 1
        self._ended(record)

    def _hear_first_token(self, record: Record) -> None:
        if not self._runs(record.router):
            return
        now = self._timeline.now_s
        first_token, outcomes = self.routers[record.router].on_first_token(now, record.arrival.work.request_id)
        if self._observer is not None and first_token is not None:
            self._observer.first_token(now, record.router, first_token)
        self._after(record.router, outcomes)

    def _hear_end(self, record: Record) -> None:
        self._open -= 1
        work = record.arrival.work
        usage = Usage(
            prompt_tokens=work.prompt_tokens,
            completion_tokens=work.output_tokens,
            # Engines count the tokens that they fetched as cached.
            cached_tokens=record.cached_tokens + (record.pulled_tokens if self._config.pool.fetches_kv else 0)
            if self._config.reports_cached_tokens
            else None,
        )
        if not self._runs(record.router):
            self._report_orphan(record, Progress(request_id=work.request_id, step=Step.FINISHED, usage=usage))
            return
        completion, outcomes = self.routers[record.router].on_finished(self._timeline.now_s, work.request_id, usage)
        if completion is not None:
            record.predicted_tokens = completion.predicted_cached_tokens
        self._after(record.router, outcomes)

    def _fail(self, record: Record) -> None:
        """End a request of a failed engine, and report the failure to the request's router."""
        assert not record.failed, f"{record.arrival.request_id} failed twice"
        record.failed = True
        self._open -= 1
        self._may_give_up(record)
        self._ended(record)
        if not self._runs(record.router):
            self._report_orphan(record, Progress(request_id=record.arrival.request_id, step=Step.FAILED))
            return
        effects = self.routers[record.router].on_failed(self._timeline.now_s, record.arrival.request_id)
        self._after(record.router, effects.outcomes)

    def _runs(self, router: int) -> bool:
        return self._timeline.now_s < self._config.replicas[router].lost_s

    def _lose_router(self, router: int) -> None:
        """Fail the requests for which a lost router had not decided; the engines serve its other requests."""
        for record in tuple(self._records.values()):
            if record.router == router and record.dispatched_s is None and record.refused is None:
                self._fail(record)

    def _report_orphan(self, record: Record, progress: Progress) -> None:
        if self._messages is not None:
            self._messages.report_orphan(record.router, progress)

    def _publish(self, pool: Pool) -> None:
        self._instances.adopt(pool)
        for number, router in enumerate(self.routers):
            self._after(number, router.on_pool(self._timeline.now_s, pool).outcomes)

    def _happen(self, event: Event) -> None:
        if isinstance(event, PoolChange):
            self._publish(event.pool)
        elif isinstance(event, Fail):
            self._die(self._instances.of(event.member))
        elif isinstance(event, Recover):
            self._instances.recover(event.member)
        elif isinstance(event, Forget):
            self._instances.of(event.member).engine.cache.clear()
        elif isinstance(event, Bypass):
            instance = self._instances.of(event.member)
            instance.engine.cache_prompt(self._timeline.now_s, event.blocks)
            self._publish_kv_events(instance)
        else:
            self._instances.change_speed(event.member, event.engine)

    def _die(self, instance: Instance) -> None:
        if instance.alive:
            # The engine advances first, because its tokens until now count.
            self._advance(instance)
            steps = instance.engine.decode_steps
            for request_id in instance.die():
                record = self._records[request_id]
                if not self._continue(record, steps):
                    self._fail(record)

    def _continue(self, record: Record, decode_steps: int) -> bool:
        """Send the rest of a stream to another engine, if there is one. The failed one made ``decode_steps``."""
        if self._continuations is None:
            return False
        rest = self._continuations.rest_of(record, decode_steps=decode_steps)
        target = None if rest is None else self._instances.find(rest[0])
        if rest is None or target is None or not target.alive:
            return False
        self._continuations.asked(self._timeline.now_s, record)
        self._submit(target, rest[1])
        return True

    def _discover(self, config: ClusterConfig) -> None:
        now = self._timeline.now_s
        self._timeline.at(now + LOAD_EVERY_S, self._discover, config, ticks=True)
        for instance in self._instances:
            if not instance.alive:
                continue
            # The engine advances first, because its tokens until now count.
            self._advance(instance)
            self._wake_engine(instance)
            profile = profile_of(instance.engine, now)
            for number, router in enumerate(self.routers):
                self._after(number, router.on_profile(now, instance.member, profile).outcomes)

    def _sample(self, every_s: float) -> None:
        now = self._timeline.now_s
        self._timeline.at(now + every_s, self._sample, every_s, ticks=True)
        pending_tokens = self._instances.pending_tokens()
        for number, router in enumerate(self.routers):
            if not self._runs(number):
                continue
            for endpoint in router.status().endpoints:
                pending_tokens[endpoint.id] += endpoint.held_prefill_tokens
        self.samples.append(LoadSample(at_s=now, pending_tokens=pending_tokens))
