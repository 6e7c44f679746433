"""Prefill and decode apart in virtual time: two pools, their routers, and the engines behind them.

The router is core's ``RemotePrefills`` over two ``PoolRouter``, as in production. A member of the prefill pool computes
a prompt. Its KV then moves to the decode member at a bandwidth, and the decode member computes the prompt's last token
again (``decoders.py`` describes the same for a static split, in which no router chooses the decode member). A decode
member also computes the prompts that stay there, in pieces beside its decodes.

Two simplifications favour the split, as in ``decoders.py``: a transfer slows down no engine, and needs no memory at the
decode member before it has ended. The whole prompt moves, also what the decode member caches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.remote_prefills import Outcomes, Prefiller, RemotePrefills, Settled
from dualmap.requests import Asked, Decision, Outcome, Queued, Rejection, Request, Usage
from dualmap.router import PoolRouter
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import EngineRequest, Finished, FirstToken
from dualmap_sim.instances import Instance, Instances
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record
from dualmap_sim.timeline import Timeline

_STEP_TOKENS: Final = 2048
"""Tokens of a decode member's step. A transferred prompt adds one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """The settings of a run: a pool with ``prefill_pool`` set, its prefill pool, and the engine of all members.

    KV moves at ``transfer_tokens_per_s``.
    """

    decode: Pool
    prefill: Pool
    engine: EngineConfig
    transfer_tokens_per_s: float
    gives_up: Callable[[Record], bool] | None = None
    """A function that the run calls at each first token and rejection. If it returns True, the run ends."""


def split_pools(pool: Pool, *, prefillers: int) -> tuple[Pool, Pool]:
    """Return a pool with the last ``prefillers`` of its members in a prefill pool, and this prefill pool."""
    name = f"{pool.name}-prefill"
    decoding, prefilling = pool.members[:-prefillers], pool.members[-prefillers:]
    return replace(pool, members=decoding, prefill_pool=name), replace(pool, name=name, members=prefilling)


class SplitCluster:
    """One run."""

    def __init__(self, config: SplitConfig) -> None:
        self._config = config
        self._timeline = Timeline()
        self._decode, self._prefill = PoolRouter(config.decode), PoolRouter(config.prefill)
        self._prefills = RemotePrefills()
        engine = config.engine
        decoding = replace(engine, pull_tokens_per_s=inf, chunk_tokens=_STEP_TOKENS)
        self._decoding = Instances(config.decode, engine=decoding, engines={})
        self._prefilling = Instances(config.prefill, engine=replace(engine, decode=None), engines={})
        self._records: dict[str, Record] = {}
        self._open = 0
        self._router_wakes_s = inf
        self.gave_up = False
        """Whether ``gives_up`` ended the run."""

    def run(self, arrivals: Sequence[Arrival]) -> tuple[Record, ...]:
        """Replay the requests until the last has ended; return a record of each, in order of arrival.

        Raises ValueError for a closed loop.
        """
        if any(each.follows is not None for each in arrivals):
            raise ValueError("prefill and decode apart: a closed loop is not accepted; give a trace with arrival times")
        self._open = len(arrivals)
        for arrival in arrivals:
            self._timeline.at(arrival.at_s, self._arrive, arrival)
        while self._open and not self.gave_up:
            assert not self._timeline.is_over, f"{self._open} requests never end"
            self._timeline.step()
        return tuple(self._records.values())

    def _arrive(self, arrival: Arrival) -> None:
        now = self._timeline.now_s
        self._records[arrival.request_id] = Record(arrival=arrival, router=0)
        request = Request(id=arrival.request_id, chain=arrival.chain, arrived_s=now, session=arrival.session)
        answer, settled = self._prefills.on_request(now, request, self._decode, Prefiller(self._prefill, request))
        assert not isinstance(answer, Asked), "a single router asks no owner"
        self._deliver([Settled(self._decode, answer), *settled])

    def _release(self, *effects: Outcomes) -> None:
        self._deliver(self._prefills.settle(self._timeline.now_s, effects))

    def _deliver(self, settled: Sequence[Settled]) -> None:
        for each in settled:
            self._decided(each.outcome)
        self._wake_router()

    def _decided(self, outcome: Outcome) -> None:
        now, record = self._timeline.now_s, self._records[outcome.request_id]
        if isinstance(outcome, Queued):
            record.held = True
        elif isinstance(outcome, Rejection):
            record.refused = outcome.reason
            self._open -= 1
            self._may_give_up(record)
        else:
            record.dispatched_s, record.endpoint = now, outcome.endpoints[0]
            record.rule = _rule(outcome)
            work = record.arrival.work
            if outcome.prefillers:
                self._submit(self._prefilling.at(outcome.prefillers[0]), replace(work, output_tokens=1))
            else:
                self._submit(self._decoding.at(record.endpoint), work)

    def _submit(self, instance: Instance, work: EngineRequest) -> None:
        instance.submit(self._timeline.now_s, work, weighed=False)
        self._wake(instance)

    def _wake(self, instance: Instance) -> None:
        due_s = instance.engine.next_event_s()
        if due_s is not None and due_s != instance.wakes_s:
            instance.wakes_s = due_s
            self._timeline.at(due_s, self._due, instance)

    def _due(self, instance: Instance) -> None:
        if instance.wakes_s != self._timeline.now_s:
            return
        instance.wakes_s = inf
        for event in instance.engine.advance(self._timeline.now_s):
            if instance.engine.config.decode is None:
                self._on_prefill_engine(event)
            elif isinstance(event, FirstToken):
                self._on_first_token(event)
            else:
                self._on_end(event)
        self._wake(instance)

    def _on_prefill_engine(self, event: FirstToken | Finished) -> None:
        if isinstance(event, Finished):
            return
        record = self._records[event.request_id]
        record.prefilled_s, record.cached_tokens = event.at_s, event.cached_tokens
        work = record.arrival.work
        arrives_s = event.at_s + work.prompt_tokens / self._config.transfer_tokens_per_s
        self._timeline.at(arrives_s, self._transferred, replace(work, pulled_tokens=work.prompt_tokens))

    def _transferred(self, work: EngineRequest) -> None:
        endpoint = self._records[work.request_id].endpoint
        assert endpoint is not None, "a prefilled request has a decode member"
        self._submit(self._decoding.at(endpoint), work)

    def _on_first_token(self, event: FirstToken) -> None:
        now, record = self._timeline.now_s, self._records[event.request_id]
        if record.prefilled_s is None:
            record.prefilled_s, record.cached_tokens = event.at_s, event.cached_tokens
        record.first_token_s = event.at_s
        self._may_give_up(record)
        outcomes = self._decode.on_first_token(now, event.request_id).outcomes
        _, effects = self._prefills.on_first_token(now, event.request_id)
        self._release((self._decode, outcomes), *effects)

    def _on_end(self, event: Finished) -> None:
        now, record = self._timeline.now_s, self._records[event.request_id]
        record.finished_s = event.at_s
        self._open -= 1
        work = record.arrival.work
        usage = Usage(
            prompt_tokens=work.prompt_tokens, completion_tokens=work.output_tokens, cached_tokens=record.cached_tokens
        )
        completion, outcomes = self._decode.on_finished(now, event.request_id, usage)
        assert completion is not None, "the decode pool accounts for the request to its end"
        completion, effects = self._prefills.on_end(now, completion, usage, finished=True, failed=False)
        record.predicted_tokens = completion.predicted_cached_tokens
        self._release((self._decode, outcomes), *effects)

    def _may_give_up(self, record: Record) -> None:
        gives_up = self._config.gives_up
        if gives_up is not None and gives_up(record):
            self.gave_up = True

    def _wake_router(self) -> None:
        deadlines = [each for router in (self._decode, self._prefill) if (each := router.next_deadline()) is not None]
        if not deadlines:
            return
        due_s = max(min(deadlines), self._timeline.now_s)
        if due_s < self._router_wakes_s:
            self._router_wakes_s = due_s
            self._timeline.at(due_s, self._router_due, due_s)

    def _router_due(self, due_s: float) -> None:
        if self._router_wakes_s != due_s:
            return
        self._router_wakes_s = inf
        now = self._timeline.now_s
        self._release(*((router, router.on_deadline(now).outcomes) for router in (self._decode, self._prefill)))


def _rule(decision: Decision) -> str:
    """Return the rule of a decision, with where the prompt is computed."""
    prefill = decision.receipt.prefill
    assert prefill is not None, "the pool has a prefill pool"
    return prefill.where if prefill.receipt is None else f"{prefill.where} {prefill.receipt.rule}"
