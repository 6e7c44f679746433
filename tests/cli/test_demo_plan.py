"""Tests of the demo's plan: its load, its router's pool, and rejected options."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dualmap.objects.pool_reader import read_pools
from dualmap.pools.pool import Queue
from dualmap_cli.demo import command
from dualmap_cli.demo.plan import HALF_REUSE_LOAD, Plan, make_plan, pool_document
from dualmap_cli.demo.printing import preamble
from dualmap_cli.demo.serve import reworded
from dualmap_sim.workloads.statistics import measure


def plan(**changes) -> Plan:
    settings = {
        "engines": 4,
        "routers": 1,
        "policies": ("dualmap",),
        "trace_file": None,
        "requests": 200,
        "rate": None,
        "speed": 4.0,
        "seed": 0,
        "out": Path("unused"),
    }
    return make_plan(**(settings | changes))


def test_demo_default_rate_overloads_only_without_cache_reuse():
    load = plan().load

    assert (load.without_reuse + load.ideal_reuse) / 2 == pytest.approx(HALF_REUSE_LOAD)
    assert load.ideal_reuse < 1 < load.without_reuse


def test_demo_default_rate_grows_with_number_of_engines():
    assert plan(engines=8).rate == pytest.approx(2 * plan(engines=4).rate)


def test_demo_uses_given_rate_and_prints_its_load():
    slow, fast = plan(rate=1.0), plan(rate=2.0)

    assert slow.trace.duration_s == pytest.approx(200.0)
    assert fast.load.without_reuse == pytest.approx(2 * slow.load.without_reuse)


@pytest.mark.parametrize("speed", [0.1, 1.0, 4.0, 50.0])
def test_demo_pool_is_valid_at_every_speed(speed):
    addresses = {"engine-0": "127.0.0.1:4001", "engine-1": "127.0.0.1:4002"}

    (pool,) = read_pools(pool_document(plan(speed=speed), "round_robin", addresses))

    assert pool.routing.policy == "round_robin"
    assert pool.slo.ttft_s == pytest.approx(5.0 / speed)
    assert pool.engine.prefill_tokens_per_second == pytest.approx(7000 * speed)
    assert pool.routing.rebalance.decode_stall_s == pytest.approx(3.0 / speed)
    assert pool.routing.queue.dispatch_window_s == pytest.approx(Queue().dispatch_window_s / speed, abs=0.001)
    assert pool.routing.queue.max_wait_s == pytest.approx(30.0 / speed)
    assert {member.id: member.endpoint for member in pool.members} == addresses


@pytest.mark.parametrize("renderer", [None, "127.0.0.1:4000"])
def test_demo_pool_enables_kv_events_as_asked(renderer):
    (pool,) = read_pools(pool_document(plan(), "dualmap", {"engine-0": "127.0.0.1:4001"}, renderer=renderer))

    assert pool.engine.kv_events.enabled is (renderer is not None)
    assert pool.engine.tokenizer.url == (f"http://{renderer}" if renderer else "")


def test_demo_with_kv_events_runs_the_last_policy_again():
    policies = ("round_robin", "dualmap")

    assert [run.name for run in plan(policies=policies).runs] == ["round_robin", "dualmap"]
    runs = plan(policies=policies, kv_events=True).runs
    assert [(run.name, run.kv_events) for run in runs] == [
        ("round_robin", False),
        ("dualmap", False),
        ("dualmap+events", True),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "dualmap,nonsense"], ["'nonsense' is not a policy", "round_robin"]),
        (["--policies", ""], ["'' is not a policy"]),
        (["--engines", "0"], ["--engines", "1<=x<=64"]),
        (["--requests", "0"], ["--requests"]),
        (["--speed", "0"], ["'--speed': 0.0 is not in the range 0.1<=x<=50"]),
        (["--speed", "nan"], ["'--speed': nan is not in the range 0.1<=x<=50"]),
        (["--speed", "inf"], ["'--speed': inf is not in the range 0.1<=x<=50"]),
        (["--rate", "-1"], ["'--rate': -1.0 is not in the range 0.01<=x<=10000"]),
        (["--rate", "nan"], ["'--rate': nan is not in the range 0.01<=x<=10000"]),
        (["--rate", "inf"], ["'--rate': inf is not in the range 0.01<=x<=10000"]),
        (["--rate", "1e-9"], ["'--rate': 1e-09 is not in the range 0.01<=x<=10000"]),
        (["--trace", "/nonexistent.jsonl"], ["--trace", "does not exist"]),
        (["--out", __file__], ["--out", "is a file"]),
        (["--out", f"{__file__}/below"], ["--out", "give a writable folder"]),
    ],
)
def test_demo_invalid_option_error_names_accepted_values(arguments, words):
    result = CliRunner().invoke(command.demo, arguments)

    assert result.exit_code == 2
    for word in words:
        assert word in result.output


def test_demo_cuts_long_prompts_and_prints_a_note(tmp_path):
    file = tmp_path / "long.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 512 * blocks, "output_length": 1, "hash_ids": list(range(blocks))}
        for blocks in (40, 41, 60)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))

    long, whole = plan(trace_file=file), plan(trace_file=file, requests=1)

    assert long.prompts_cut == 2
    assert {request.input_tokens for request in long.trace.requests} == {20_480}
    assert "prompts cut to the 20,480 tokens that an engine computes: 2\n" in preamble(long)
    assert whole.prompts_cut == 0
    assert "prompts cut" not in preamble(whole)


def test_demo_invalid_trace_exits_2_with_file_and_line(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"timestamp": 0, "input_length": -3, "output_length": 1, "hash_ids": [0]}\n')

    result = CliRunner().invoke(command.demo, ["--trace", str(file)])

    assert result.exit_code == 2
    assert f"{file}:1: input_length: -3 is not accepted" in result.output


@pytest.mark.parametrize("package", ["envoy", "matplotlib"])
def test_demo_without_installed_extra_fails_before_start(tmp_path, monkeypatch, package):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else object())

    result = CliRunner().invoke(command.demo, ["--out", str(tmp_path), "--requests", "1"])

    assert result.exit_code == 1
    assert f"needs the package {package}; run: pip install 'dualmap[demo]'" in result.output
    assert list(tmp_path.iterdir()) == []


def test_demo_serve_rounds_have_equal_lengths_but_different_text():
    trace = plan(requests=50).trace
    first, second = reworded(trace, 0), reworded(trace, 3)

    assert first == trace
    assert [(r.arrival_s, r.input_tokens, len(r.blocks)) for r in second.requests] == [
        (r.arrival_s, r.input_tokens, len(r.blocks)) for r in trace.requests
    ]
    blocks = {block for request in trace.requests for block in request.blocks}
    assert blocks.isdisjoint(block for request in second.requests for block in request.blocks)
    assert measure(second).ideal_hit_rate == measure(trace).ideal_hit_rate


@pytest.mark.parametrize(
    ("routers", "record", "names"),
    [(1, False, []), (1, True, ["recording"]), (2, True, ["recording-0", "recording-1"])],
)
def test_each_router_has_a_recording_of_its_own(routers: int, record: bool, names: list[str]) -> None:
    made = plan(routers=routers, record=record)
    assert [path.name for path in made.recordings] == names
