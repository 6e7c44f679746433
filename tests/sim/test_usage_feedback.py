"""Stale hits in three cases that no event tells the router, with and without what the engines' usage teaches.

Engine and router have blocks of 128 tokens, so that a stale hit is no matter of rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from clusters import SEVEN_B, busy_config
from dualmap.requests import Usage
from dualmap.router import PoolRouter
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig
from dualmap_sim.events import Bypass, Event, Forget
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record
from dualmap_sim.summary import summarise
from dualmap_sim.workloads.synthetic import default_workload

ENGINE = replace(SEVEN_B, block_tokens=128)
MEMBERS = 8
SEEDS = (1, 2, 3, 4)
FOREIGN = 10**12


@cache
def requests(seed: int) -> tuple[Arrival, ...]:
    trace = default_workload(2000, seed=seed).at_rate(8.0)
    return arrivals(trace, router_block_tokens=128, engine_block_tokens=128)


def run(monkeypatch: pytest.MonkeyPatch, config: ClusterConfig, *, cached: bool, seed: int = 1) -> tuple[Record, ...]:
    """Replay the requests; without ``cached``, the engines do not report their cached tokens."""
    with monkeypatch.context() as patched:
        if not cached:
            finished = PoolRouter.on_finished

            def silent(router: PoolRouter, now: float, request_id: str, usage: Usage | None = None) -> object:
                return finished(router, now, request_id, None if usage is None else replace(usage, cached_tokens=None))

            patched.setattr(PoolRouter, "on_finished", silent)
        return Cluster(config).run(requests(seed))


def stale(records: Sequence[Record]) -> int:
    return sum(record.stale_hit for record in records)


def overpredicted(records: Sequence[Record]) -> int:
    return sum(max(0, (record.predicted_tokens or 0) - record.cached_tokens) for record in records)


def config(engine: EngineConfig = ENGINE, events: tuple[Event, ...] = ()) -> ClusterConfig:
    return replace(busy_config(1, members=MEMBERS), engine=engine, events=events)


def at(part: float, seed: int = 1) -> float:
    return part * requests(seed)[-1].at_s


def compare(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[int], ClusterConfig]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return several runs' stale hits, and their tokens too many, without and with the reports of cached tokens."""
    before: list[Record] = []
    after: list[Record] = []
    for seed in SEEDS:
        before += run(monkeypatch, case(seed), cached=False, seed=seed)
        after += run(monkeypatch, case(seed), cached=True, seed=seed)
    return (stale(before), stale(after)), (overpredicted(before), overpredicted(after))


def restarts(seed: int) -> ClusterConfig:
    parts = enumerate((0.3, 0.4, 0.5, 0.6, 0.7))
    return config(events=tuple(Forget(at_s=at(part, seed), member=f"m-{number}") for number, part in parts))


def other_traffic(seed: int) -> ClusterConfig:
    """Every member caches 50 prompts of 128 000 tokens that no router sent; a cache has a million."""
    return config(
        events=tuple(
            Bypass(
                at_s=at(number / 400, seed),
                member=f"m-{number % MEMBERS}",
                blocks=tuple(range(FOREIGN + 10_000 * number, FOREIGN + 10_000 * number + 1000)),
            )
            for number in range(400)
        )
    )


def test_usage_changes_nothing_while_predictions_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (run(monkeypatch, config(), cached=cached) for cached in (False, True))
    assert before == after
    assert (stale(after), overpredicted(after)) == (0, 0)
    assert sum(record.predicted_hit for record in after) == 1895


def test_usage_avoids_stale_hits_after_unnoticed_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, restarts) == ((191, 120), (820_352, 636_928))


def test_usage_learns_a_cache_a_tenth_of_cache_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config(replace(ENGINE, cache_tokens=100_000))
    assert compare(monkeypatch, lambda _: small) == ((625, 505), (2_688_000, 2_424_576))


def test_usage_learns_the_part_of_a_cache_that_other_traffic_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, other_traffic) == ((396, 328), (1_250_304, 1_080_448))


def test_summary_has_the_share_of_stale_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    records = run(monkeypatch, config(events=(Forget(at_s=at(0.5), member="m-1"),)), cached=True)
    expected = sum(record.predicted_hit for record in records)
    assert stale(records) > 0
    assert summarise(records, slo_ttft_s=5.0).stale_rate == stale(records) / expected
