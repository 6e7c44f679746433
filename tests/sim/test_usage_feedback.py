"""Stale hits in three cases that no event tells the router, with and without what the engines' usage teaches.

Engine and router have blocks of 128 tokens, so that a stale hit is no matter of rounding.
"""

from collections.abc import Sequence
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
FOREIGN = 10**12


@cache
def requests() -> tuple[Arrival, ...]:
    trace = default_workload(2000, seed=1).at_rate(8.0)
    return arrivals(trace, router_block_tokens=128, engine_block_tokens=128)


def run(monkeypatch: pytest.MonkeyPatch, config: ClusterConfig, *, cached: bool) -> tuple[Record, ...]:
    """Replay the requests; without ``cached``, the engines do not report their cached tokens."""
    with monkeypatch.context() as patched:
        if not cached:
            finished = PoolRouter.on_finished

            def silent(router: PoolRouter, now: float, request_id: str, usage: Usage | None = None) -> object:
                return finished(router, now, request_id, None if usage is None else replace(usage, cached_tokens=None))

            patched.setattr(PoolRouter, "on_finished", silent)
        return Cluster(config).run(requests())


def stale(records: Sequence[Record]) -> int:
    return sum(record.stale_hit for record in records)


def overpredicted(records: Sequence[Record]) -> int:
    return sum(max(0, (record.predicted_tokens or 0) - record.cached_tokens) for record in records)


def config(engine: EngineConfig = ENGINE, events: tuple[Event, ...] = ()) -> ClusterConfig:
    return replace(busy_config(1, members=MEMBERS), engine=engine, events=events)


def at(part: float) -> float:
    return part * requests()[-1].at_s


def compare(monkeypatch: pytest.MonkeyPatch, compared: ClusterConfig) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Return the records without and with the reports of cached tokens."""
    return run(monkeypatch, compared, cached=False), run(monkeypatch, compared, cached=True)


def test_usage_changes_nothing_while_predictions_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = compare(monkeypatch, config())
    assert before == after
    assert (stale(after), overpredicted(after)) == (0, 0)
    assert sum(record.predicted_hit for record in after) == 1894


def test_usage_halves_stale_hits_after_unnoticed_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = enumerate((0.3, 0.4, 0.5, 0.6, 0.7))
    events = tuple(Forget(at_s=at(part), member=f"m-{number}") for number, part in parts)
    before, after = compare(monkeypatch, config(events=events))
    assert (stale(before), stale(after)) == (48, 24)
    assert overpredicted(after) < 0.9 * overpredicted(before)


def test_usage_learns_a_cache_a_tenth_of_cache_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = compare(monkeypatch, config(replace(ENGINE, cache_tokens=100_000)))
    assert (stale(before), stale(after)) == (167, 115)
    assert overpredicted(after) < 0.9 * overpredicted(before)


def test_usage_learns_the_part_of_a_cache_that_other_traffic_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member caches 50 prompts of 128 000 tokens that no router sent; a cache has a million."""
    events = tuple(
        Bypass(
            at_s=at(number / 400),
            member=f"m-{number % MEMBERS}",
            blocks=tuple(range(FOREIGN + 10_000 * number, FOREIGN + 10_000 * number + 1000)),
        )
        for number in range(400)
    )
    before, after = compare(monkeypatch, config(events=events))
    assert (stale(before), stale(after)) == (104, 80)
    assert overpredicted(after) < 0.9 * overpredicted(before)


def test_summary_has_the_share_of_stale_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    records = run(monkeypatch, config(events=(Forget(at_s=at(0.5), member="m-1"),)), cached=True)
    expected = sum(record.predicted_hit for record in records)
    assert stale(records) > 0
    assert summarise(records, slo_ttft_s=5.0).stale_rate == stale(records) / expected
