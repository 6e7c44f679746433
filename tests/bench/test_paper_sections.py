"""Tests of the figures that single sections of the evaluation compute from a run."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType

import pytest

from clusters import config, one_block_prompts, small_pool
from dualmap_sim.cluster import Cluster
from dualmap_sim.experiment import Experiment
from dualmap_sim.records import LoadSample
from dualmap_sim.workloads.catalog import Workload
from engines import ROUND

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.paper.{name}")


def small_run(policy: str, *, rate: float = 8.0) -> Experiment:
    return Experiment(workload=Workload(requests=300), policy=policy, requests_per_s=rate, warmup=50)


def test_tpot_is_the_time_between_tokens_after_the_first(bench: Bench) -> None:
    records = Cluster(config(small_pool(1))).run(one_block_prompts(0.0, 10.0))
    assert bench("measures").tpot_figures(records)["tpot_p50_s"] == 0.25


def test_memory_wait_of_a_request_lasts_until_a_decode_ends(bench: Bench) -> None:
    engine = replace(ROUND, kv_memory_tokens=150)
    records = Cluster(config(small_pool(1), engine=engine)).run(one_block_prompts(0.0, 0.0))
    assert bench("sections.decode").memory_waits_s(records, engine) == [0.0, 0.25]


def test_request_behind_a_prefill_does_not_wait_for_memory(bench: Bench) -> None:
    records = Cluster(config(small_pool(1))).run(one_block_prompts(0.0, 0.5, 1.0))
    assert bench("sections.decode").memory_waits_s(records, ROUND) == [0.0, 0.0, 0.0]


def test_load_series_has_every_instance_in_every_slot(bench: Bench) -> None:
    figures = bench("sections.load").load_over_time(small_run("least_loaded"))
    assert {len(each) for each in figures["instances"]} == {8}
    assert len(figures["instances"]) == len(figures["cvs"]) <= 60
    assert figures["hot_share"] <= figures["some_hot_share"] <= 1


def test_load_is_cut_into_slots_of_equal_duration(bench: Bench) -> None:
    samples = [LoadSample(at_s=at_s, pending_tokens={"a": 1}) for at_s in (5.0, 6.0, 15.0, 26.0)]
    slots = bench("sections.load")._cut(samples, 10.0)
    assert [[each.at_s for each in slot] for slot in slots] == [[5.0, 6.0], [15.0], [26.0]]


def test_ear_threshold_decides_how_many_sessions_move(bench: Bench) -> None:
    agents = bench("agents")
    moved = [agents.agents(agents.Run(hot_s=hot_s), 600, 0)["moved_share"] for hot_s in (0.1, inf)]
    assert moved[0] > 0
    assert moved[1] == 0


def test_static_split_reports_the_use_of_decode_memory(bench: Bench) -> None:
    agents = bench("agents")
    figures = agents.agents(agents.Run(policy="ear", moves=False, decoders=4), 400, 0)
    assert 0 < figures["decode_memory_share"] <= 1
    assert figures["decode_wait_p50_s"] > 0


def test_prefill_stops_decodes_longer_without_chunks(bench: Bench) -> None:
    interference = bench("agents").interference
    whole, chunked = interference(None), interference(2048)
    assert whole["beside_s"] == pytest.approx(0.02 + (8192 + 1e-5 * 8192**2) / 14_000, rel=0.1)
    assert chunked["beside_s"] < whole["beside_s"] / 2
    assert whole["alone_s"] == chunked["alone_s"] == pytest.approx(0.018, rel=0.05)


def test_block_length_run_reports_errors_of_predictions(bench: Bench) -> None:
    figures = bench("sections.blocks").run_of_length(replace(small_run("dualmap"), block_tokens=128))
    assert figures["wrong_share"] <= 1
    assert figures["decision_us"] > 0
