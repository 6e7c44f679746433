"""Sends events to a router's metrics and parses the metrics page, for the tests of the metrics."""

from collections.abc import Callable, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import builders
from dualmap.engines.source import SourceState
from dualmap.pools.pool import MemberState, Pool
from dualmap.receipt import Key, PrefillReceipt, Receipt
from dualmap.requests import (
    Completion,
    Decision,
    EndpointStatus,
    EventsStatus,
    FirstToken,
    PoolSnapshot,
    ShadowStatus,
)
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.errors import Refused, model_not_found, no_endpoint
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observations import (
    Abandoned,
    Arrival,
    ClientLimited,
    Decided,
    Ended,
    Enqueued,
    Expired,
    FanOut,
    FirstTokenSeen,
    Measured,
    PickNotFollowed,
    Rejected,
    Routed,
    RoutedBodiless,
    ServedElsewhere,
)
from dualmap_extproc.telemetry.counts import Traffic
from dualmap_extproc.telemetry.metrics import Metrics

POOL = "llm/qwen"


def decision(chosen: str = "m-0", *, rule: str = "pair-warm", prompt: int = 100, matched: int = 60) -> Decision:
    receipt = Receipt(
        pool=POOL,
        policy="dualmap",
        rule=rule,
        reason="",
        key=Key(hash=1, blocks=1, tokens=128),
        pair=("m-0", "m-1"),
        chosen=chosen,
        address="10.0.0.1:8000",
        prompt_tokens=prompt,
        matched_tokens=matched,
        predicted_ttft_s=0.1,
        candidates=(),
    )
    return Decision(request_id="r", endpoints=("10.0.0.1:8000",), receipt=receipt)


def first_token(member: str = "m-0", *, ttft_s: float = 0.3, within_slo: bool = True) -> FirstToken:
    return FirstToken(member=member, ttft_s=ttft_s, predicted_ttft_s=0.2, within_slo=within_slo)


def completion(member: str = "m-0", *, predicted: int = 60, measured: int | None = None) -> Completion:
    return Completion(request_id="r", member=member, predicted_cached_tokens=predicted, measured_cached_tokens=measured)


def status(*states: MemberState, pool: str = POOL) -> PoolSnapshot:
    endpoints = tuple(
        EndpointStatus(
            id=f"m-{n}",
            endpoint=f"10.0.0.{n + 1}:8000",
            state=state.value,
            weight=100,
            in_flight=n + 1,
            held=10 * n,
            pending_prefill_tokens=1000 * (n + 1),
            held_prefill_tokens=700 * n,
            active_kv_tokens=5000,
            indexed_blocks=40,
            prefill_tokens_per_second=6500.499999999999,
            solo_tokens_per_second=6600.0,
            suspended=state is MemberState.DRAINING,
            events=EventsStatus(state=SourceState.PARTIAL if n else SourceState.LIVE),
            leave_at_s=1_800_000_000.0 if state is MemberState.DRAINING else None,
        )
        for n, state in enumerate(states)
    )
    return PoolSnapshot(
        pool=pool,
        ring_version=7,
        held=13,
        sessions=21,
        peers=3,
        endpoints=endpoints,
        hotness_nodes=12,
        split_prefixes=2,
        shadows=(
            ShadowStatus(policy="dualmap", agreed=9, predicted_ttft_s=2.25, predicted_cached_tokens=900),
            ShadowStatus(policy="ear", agreed=5, differed=4, predicted_ttft_s=2.5, predicted_cached_tokens=450),
        ),
    )


class Counting:
    """A router's metrics and demand, with helpers that send request events at the clock's time."""

    def __init__(self, *pools: Pool, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.metrics = Metrics(version="1.2.3", replica_id="router-0")
        self._demand = Demand(clock)
        self._clock = clock
        observations = FanOut()
        self.metrics.subscribe(observations)
        self._demand.subscribe(observations)
        self._report = observations.report
        self.signals = self._demand.signals
        self.set_pools(pools or (builders.pool(2),))

    def set_pools(self, pools: Sequence[Pool]) -> None:
        self.metrics.set_pools(pools)
        self._demand.set_pools(pools)

    def traffic(self, pool: str) -> Traffic:
        return self.metrics.traffic(pool)

    def routed(self, pool: str, decision: Decision, *, queued_s: float | None = None) -> None:
        arrival = Arrival(at_s=self._clock(), headers={})
        self._report(Routed(now=self._clock(), pool=pool, decision=decision, arrival=arrival, queued_s=queued_s))

    def routed_bodiless(self, pool: str) -> None:
        self._report(RoutedBodiless(now=self._clock(), pool=pool))

    def queued(self, pool: str) -> None:
        self._report(Enqueued(now=self._clock(), pool=pool))

    def client_limited(self, pool: str) -> None:
        self._report(ClientLimited(now=self._clock(), pool=pool))

    def abandoned(self, pool: str, seconds: float) -> None:
        arrival = Arrival(at_s=self._clock(), headers={})
        self._report(Abandoned(now=self._clock(), pool=pool, arrival=arrival, queued_s=seconds))

    def refused(self, refused: Refused, *, queued_s: float | None = None) -> None:
        now = self._clock()
        self._report(Rejected(now=now, pool=refused.pool, refused=refused, arrival=None, queued_s=queued_s))

    def decided(self, seconds: float) -> None:
        self._report(Decided(now=self._clock(), seconds=seconds))

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        self._report(FirstTokenSeen(now=self._clock(), pool=pool, first_token=first_token))

    def ended(self, pool: str, ending: Ending, completion: Completion) -> None:
        self._report(Ended(now=self._clock(), pool=pool, ending=ending, completion=completion))

    def finished(self, pool: str, completion: Completion) -> None:
        self.ended(pool, Ending.FINISHED, completion)

    def expired(self, pool: str, completion: Completion) -> None:
        self._report(Expired(now=self._clock(), pool=pool, completion=completion))

    def measured(self, pool: str, completion: Completion) -> None:
        self._report(Measured(now=self._clock(), pool=pool, completion=completion))

    def not_followed(self, pool: str) -> None:
        self._report(PickNotFollowed(now=self._clock(), pool=pool))

    def served_elsewhere(self, pool: str) -> None:
        self._report(ServedElsewhere(now=self._clock(), pool=pool))


def metrics(*pools: Pool) -> Counting:
    return Counting(*pools)


def families(made: Counting, *statuses: PoolSnapshot) -> list[Metric]:
    return list(text_string_to_metric_families(made.metrics.render(statuses, made.signals(statuses)).decode()))


def samples(made: Counting, *statuses: PoolSnapshot) -> dict[str, float]:
    """Return every sample as ``name{label=value,...}`` with sorted labels."""
    found = {}
    for family in families(made, *statuses):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def everything(made: Counting) -> None:
    """Send every event once."""
    routed = decision()
    prefill = PrefillReceipt(pool="llm/prefill", local="short")
    made.routed(POOL, routed._replace(receipt=routed.receipt._replace(prefill=prefill)))
    made.routed_bodiless(POOL)
    made.refused(no_endpoint(POOL))
    made.refused(model_not_found("m"))
    made.decided(0.0003)
    made.first_token(POOL, first_token())
    for ending in Ending:
        made.ended(POOL, ending, completion())
    made.client_limited(POOL)
    made.abandoned(POOL, 1.5)
    made.expired(POOL, completion())
    made.measured(POOL, completion(measured=50))
    made.served_elsewhere(POOL)
    made.not_followed(POOL)
    made.metrics.discovery_streams(3)
    made.metrics.discovery_pushed()
    made.metrics.discovery_rejected()
    made.metrics.access_log_entries(known=5, others=2)
    made.metrics.access_log_unreadable()
    made.metrics.pools_refused()
    made.metrics.pool_file_refused(True)
