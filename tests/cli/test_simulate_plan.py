"""Tests of the experiments that options select, and of the engine's parameters by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from dualmap_cli.simulate.engine_options import PARAMETERS, changed, described
from dualmap_cli.simulate.plan import Plan, half_reuse_rate, make_plan, sample_s
from dualmap_sim.experiment import load_trace
from dualmap_sim.presets import PRESETS, EngineConfig, slowed
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.workloads.catalog import Workload

SEVEN_B = PRESETS["7b"]
OPTIONS: dict[str, Any] = {
    "trace_file": None,
    "recording": None,
    "pool_name": None,
    "scale": 1.0,
    "workload": None,
    "sessions": None,
    "requests": 200,
    "warmup": None,
    "starts": (0,),
    "seeds": (0,),
    "pool": None,
    "policies": ("dualmap",),
    "instances": 4,
    "prefillers": 0,
    "model": "7b",
    "engine_file": None,
    "parameters": (),
    "slow": (),
    "slo_ttft_s": 5.0,
    "routers": 1,
    "decide": "owner",
    "hop_delay_s": 0.001,
    "store_tokens_per_s": None,
    "view_delay_s": 0.1,
    "feedback_delay_s": 0.0,
    "believed_speed": None,
    "processes": None,
    "plot": None,
    "as_json": False,
}


def plan(**options: Any) -> Plan:
    return make_plan(**{**OPTIONS, **options})


def test_plan_with_a_prefill_pool_moves_kv_and_not_sessions() -> None:
    base = plan(prefillers=1).base

    assert (base.prefillers, base.kv_moves, base.engine.pull_tokens_per_s) == (1, False, 100_000.0)
    assert plan(prefillers=1, parameters=(("pull", 5000.0),)).base.engine.pull_tokens_per_s == 5000.0


@pytest.mark.parametrize(
    "options",
    [
        {"prefillers": 4},
        {"prefillers": 1, "model": "pd"},
        {"prefillers": 1, "routers": 2},
        {"prefillers": 1, "slow": (("qwen-0", 0.5),)},
        {"prefillers": 1, "policies": ("limit",)},
    ],
)
def test_plan_with_a_prefill_pool_that_is_not_modelled_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(click.BadParameter, match="is not accepted"):
        plan(**options)


def numbers_of(config: EngineConfig) -> dict[str, float | None]:
    """Return every number in an engine's configuration by its --set name."""
    decode = config.decode
    assert decode is not None
    return {
        "r": config.prefill.tokens_per_s,
        "a": config.prefill.attention,
        "o": config.prefill.overhead_s,
        "l": config.prefill.load_tokens_per_s,
        "m": config.kv_memory_tokens,
        "c": config.cache_tokens,
        "cap": config.input_tokens_max,
        "d0": decode.step_s,
        "d1": decode.per_kv_token_s,
        "d2": decode.per_request_s,
        "block": config.block_tokens,
        "chunk": config.chunk_tokens,
        "pull": config.pull_tokens_per_s,
    }


def test_kv_store_option_gives_the_instances_a_store() -> None:
    assert plan().base.store is None
    assert plan(store_tokens_per_s=5000.0).base.store == StoreConfig(tokens_per_s=5000.0)


@pytest.mark.parametrize(
    "options",
    [
        {"parameters": (("pull", 1000.0),), "sessions": True},
        {"policies": ("limit",)},
    ],
)
def test_kv_store_beside_what_has_no_store_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(click.BadParameter, match="--kv-store"):
        plan(store_tokens_per_s=5000.0, **options)


@pytest.mark.parametrize(("decide", "owner_decides"), [("owner", True), ("local", False)])
def test_decide_option_selects_owner_or_local_decisions(decide: str, owner_decides: bool) -> None:
    base = plan(routers=4, decide=decide, hop_delay_s=0.003).base
    assert (base.routers, base.owner_decides, base.hop_delay_s) == (4, owner_decides, 0.003)


@pytest.mark.parametrize("name", PARAMETERS)
def test_set_option_changes_only_its_parameter(name: str) -> None:
    assert numbers_of(changed(SEVEN_B, [(name, 77.0)])) == {**numbers_of(SEVEN_B), name: 77.0}


def test_set_option_uses_last_value_and_help_lists_names() -> None:
    assert changed(SEVEN_B, [("r", 5.0), ("c", 9.0), ("r", 6.0)]).prefill.tokens_per_s == 6.0
    assert [line.split()[0] for line in described().splitlines()] == list(PARAMETERS) == list(numbers_of(SEVEN_B))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("c", 0.5), ("m", 0.0), ("r", float("inf")), ("a", -1.0), ("o", float("nan"))),
        *(("o", 1e5), ("a", 1e4), ("d0", 1e300), ("d1", 1e5), ("r", 1e13), ("cap", 1e13), ("pull", 1e13)),
    ],
)
def test_set_option_rejects_number_out_of_bounds(name: str, value: float) -> None:
    with pytest.raises(click.BadParameter, match=rf"^{name}=.* from \S+ to \S+$"):
        changed(SEVEN_B, [(name, value)])


@pytest.mark.parametrize("options", [{"starts": (0, 9_999_900)}, {"starts": (10**7,), "requests": None}])
def test_too_many_generated_requests_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(click.BadParameter, match="give a window that ends at request 10000000 or earlier"):
        plan(**options)


def test_plan_windows_combine_every_start_with_every_seed() -> None:
    windows = plan(starts=(0, 100), seeds=(1, 2)).windows
    assert windows == tuple(
        Workload(requests=200, start=start, seed=seed) for start, seed in ((0, 1), (0, 2), (100, 1), (100, 2))
    )


@pytest.mark.parametrize(("requests", "warmup"), [(200, 50), (4, 1), (1, 0), (3000, 500)])
def test_default_warm_up_is_500_requests_or_a_quarter(requests: int, warmup: int) -> None:
    assert plan(requests=requests).base.warmup == warmup
    assert plan(requests=requests, warmup=0).base.warmup == 0


def test_short_trace_is_replayed_completely_by_default(tmp_path: Path) -> None:
    lines = [{"timestamp": n, "input_length": 9, "output_length": 1, "hash_ids": [n]} for n in range(40)]
    trace = tmp_path / "short.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    made = plan(trace_file=trace, requests=None, starts=(0, 30))
    assert not made.base.sessions, "a recorded trace names none"
    assert plan(trace_file=trace, requests=None, sessions=True).base.sessions
    assert [len(load_trace(replace(made.base, workload=window)).requests) for window in made.windows] == [40, 10]
    assert made.base.warmup == 2, "a quarter of the shortest window"


def test_slow_engine_option_sets_its_share_of_full_speed() -> None:
    assert plan(slow=(("qwen-3", 0.5),)).base.engines == (("qwen-3", slowed(SEVEN_B, 2.0)),)


def test_pull_speed_option_enables_kv_cache_transfer() -> None:
    assert not plan().base.kv_moves
    assert plan(parameters=(("pull", 50_000.0),)).base.kv_moves


def test_simulate_default_rate_has_two_digits_and_grows() -> None:
    base = plan(requests=400).base
    rate = half_reuse_rate(base)
    assert float(f"{rate:.2g}") == rate
    assert half_reuse_rate(replace(base, instances=8)) == pytest.approx(2 * rate, rel=0.05)


def test_generated_workload_sends_sessions_unless_disabled() -> None:
    assert plan().base.sessions
    assert not plan(sessions=False).base.sessions


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workload": "agentic"}, "the closed-loop workload agentic needs session ids"),
        ({"parameters": (("pull", 50_000.0),)}, "the parameter pull moves the KV cache of sessions"),
    ],
)
def test_option_that_needs_sessions_is_rejected_without_sessions(options: dict[str, Any], told: str) -> None:
    with pytest.raises(click.BadParameter, match=told):
        plan(sessions=False, **options)
    assert plan(**options).base.sessions


def test_number_of_load_samples_is_bounded() -> None:
    base = plan().base
    assert sample_s(replace(base, requests_per_s=1.0)) == 1.0
    assert sample_s(replace(base, requests_per_s=0.001)) == 200 / 0.001 / 2000
    slow = plan(parameters=(("o", 1e4),)).base
    assert sample_s(slow) == pytest.approx(200 * 1e4 / slow.instances / 2000, rel=0.01)
