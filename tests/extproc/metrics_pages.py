"""What happens to a router, told to its metrics, and the page as samples: for the tests of the metrics."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import builders
from dualmap.pools.pool import MemberState, Pool
from dualmap.receipt import Key, Receipt
from dualmap.requests import Completion, Decision, EndpointStatus, FirstToken, PoolSnapshot
from dualmap_extproc.errors import model_not_found, no_endpoint
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


def completion(member: str = "m-0", *, measured: int | None = None) -> Completion:
    return Completion(member=member, predicted_cached_tokens=60, measured_cached_tokens=measured)


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
    )


def metrics(*pools: Pool) -> Metrics:
    made = Metrics(version="1.2.3", replica_id="router-0")
    made.set_pools(pools or (builders.pool(2),))
    return made


def families(made: Metrics, *statuses: PoolSnapshot) -> list[Metric]:
    return list(text_string_to_metric_families(made.render(statuses, made.signals(statuses)).decode()))


def samples(made: Metrics, *statuses: PoolSnapshot) -> dict[str, float]:
    """Every sample as ``name{label=value,...}`` with sorted labels."""
    found = {}
    for family in families(made, *statuses):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def everything(made: Metrics) -> None:
    """Let every event happen once."""
    made.routed(POOL, decision())
    made.routed_bodiless(POOL)
    made.refused(no_endpoint(POOL))
    made.refused(model_not_found("m"))
    made.decided(0.0003)
    made.first_token(POOL, first_token())
    made.finished(POOL, completion())
    made.rejected(POOL, completion())
    made.aborted(POOL, completion())
    made.failed(POOL, completion())
    made.waited(POOL, 1.5)
    made.expired(POOL, completion())
    made.measured(POOL, completion(measured=50))
    made.served_elsewhere(POOL)
    made.discovery_streams(3)
    made.discovery_pushed()
    made.discovery_rejected()
    made.access_log_entries(known=5, others=2)
    made.access_log_unreadable()
    made.pools_refused()
    made.pool_file_refused(True)
