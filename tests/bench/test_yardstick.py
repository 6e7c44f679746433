"""Tests of the yardstick: the conversion of the trace, Dynamo's report and log, the costs, and the decisions."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dualmap.prompts.blocks import BlockChain
from dualmap_sim.workloads.mooncake import parse_mooncake
from dualmap_sim.workloads.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".dynamo" / "bin" / "python"
BLOCK = 64
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.yardstick.{name}")


def trace_of(*lengths: int) -> Trace:
    """Return a trace with batches of two requests, every 3 s. All prompts have the first block in common."""
    requests = tuple(
        TraceRequest(
            arrival_s=3.0 * (number // 2),
            blocks=(0, *(100 * (number + 1) + block for block in range(-(-length // 512) - 1))),
            input_tokens=length,
            output_tokens=3,
        )
        for number, length in enumerate(lengths)
    )
    return Trace(name="t.jsonl", block_tokens=512, requests=requests)


def row(trace: Trace, number: int, **changes: Any) -> str:
    """Return a line of Dynamo's report."""
    request = trace.requests[number]
    fields = {
        "uuid": f"id-{number}",
        "arrival_time_ms": request.arrival_s * 1000,
        "input_length": request.input_tokens,
        "ttft_ms": 250.0,
        "terminal_time_ms": request.arrival_s * 1000 + 400.0,
        "reused_input_tokens": 64,
        "decode_worker_idx": 1,
        "terminal_status": "completed",
    }
    return json.dumps(fields | changes)


def formula(worker: int, *, cached: float, prefill: float, decode: float, request: str) -> str:
    """Return a line of Dynamo's log, with its colours."""
    return (
        f"\x1b[2m2026-11-23T16:45:41Z\x1b[0m DEBUG selector\x1b[2m:\x1b[0m Formula for worker_id={worker} dp_rank=0 "
        f"with {cached:.2f} effective cached blocks: {prefill + decode:.3f} = prefill_load_scale * "
        "adjusted_prefill_blocks + decode_blocks + active_request_cost_blocks = 1.000 * "
        f"{prefill:.3f} + {decode:.3f} + 0.000 (raw_prefill_blocks: 1.000, overlap_credit_blocks: 0.000, "
        f'overlap_credit_decay: 1.000) \x1b[3mrequest_id\x1b[0m\x1b[2m=\x1b[0m"{request}" worker_type="replay"'
    )


def test_paced_trace_has_different_times_and_its_rate(bench: Bench) -> None:
    paced = bench("setting").paced(trace_of(600, 700, 800, 900), 2.0)
    assert [each.arrival_s for each in paced.requests] == [0.0, 1e-6, 2.000002, 2.000003]


def test_mooncake_lines_contain_the_paced_trace(bench: Bench) -> None:
    paced = bench("setting").paced(trace_of(600, 700, 1600), 2.0)
    lines = list(bench("setting").mooncake_lines(paced))
    assert [json.loads(line)["timestamp"] for line in lines] == [0.0, 0.001, 1500.002]
    parsed = parse_mooncake(lines, source="t.jsonl")
    assert [(each.blocks, each.input_tokens, each.output_tokens) for each in parsed.requests] == [
        (each.blocks, each.input_tokens, each.output_tokens) for each in paced.requests
    ]


def test_report_of_dynamo_is_read_in_the_order_of_the_trace(bench: Bench) -> None:
    trace = bench("setting").paced(trace_of(600, 700), 2.0)
    terms = {"id-1": {0: bench("dynamo_replay").Terms(cached=1, prefill=2, decode=3, cost=5)}}
    found = bench("dynamo_replay").read_report([row(trace, 1), row(trace, 0, ttft_ms=90.0)], trace, terms=terms)
    assert [(each.served.number, each.served.ttft_s) for each in found] == [(0, 0.09), (1, 0.25)]
    assert (found[1].served.worker, found[1].served.cached_tokens, found[1].served.prompt_tokens) == (1, 64, 700)
    assert found[1].finished_s == pytest.approx(trace.requests[1].arrival_s + 0.4)
    assert found[0].terms == {}
    assert found[1].terms == terms["id-1"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"terminal_status": "rejected"}, "did not serve request 0"),
        ({"input_length": 1}, "that the trace does not have"),
        ({"arrival_time_ms": 5.0}, "that the trace does not have"),
    ],
)
def test_report_of_dynamo_with_a_wrong_request_is_refused(bench: Bench, changes: dict[str, Any], problem: str) -> None:
    replay, trace = bench("dynamo_replay"), bench("setting").paced(trace_of(600), 2.0)
    with pytest.raises(replay.DynamoError, match=problem):
        replay.read_report([row(trace, 0, **changes)], trace, terms={})


def test_report_of_dynamo_with_a_missing_request_is_refused(bench: Bench) -> None:
    replay, trace = bench("dynamo_replay"), bench("setting").paced(trace_of(600, 700), 2.0)
    with pytest.raises(replay.DynamoError, match="1 of 2 requests"):
        replay.read_report([row(trace, 0)], trace, terms={})


def test_log_of_dynamo_has_the_terms_of_each_worker(bench: Bench) -> None:
    lines = [
        "INFO VllmKvManager initialized",
        formula(0, cached=8.0, prefill=2.5, decode=10.0, request="a"),
        formula(1, cached=0.0, prefill=10.5, decode=0.0, request="a"),
    ]
    terms, found = bench("dynamo_replay").Terms, bench("dynamo_replay").read_terms(lines)
    assert found == {
        "a": {
            0: terms(cached=8.0, prefill=2.5, decode=10.0, cost=12.5),
            1: terms(cached=0.0, prefill=10.5, decode=0.0, cost=10.5),
        }
    }


def test_costs_meet_the_formulas_of_the_mocker(bench: Bench, tmp_path: Path) -> None:
    setting = bench("setting")
    engine, file = setting.engine(setting.Costs.LINEAR), tmp_path / "profile.npz"
    setting.write_profile(file, setting.Costs.LINEAR)
    profile = np.load(file)
    # A step that computes a full chunk and decodes; the mocker adds the two costs.
    step_ms = 1000 * engine.prefill.seconds(new_tokens=setting.STEP_TOKENS, cached_tokens=0)
    assert step_ms == pytest.approx(setting.prompt_ms(8192) + setting.decode_ms(0.0))
    assert step_ms == pytest.approx(profile["prefill_ttft_ms"][1] + profile["decode_itl"][0][0])
    used = int(0.4 * setting.KV_TOKENS)
    decode_ms = 1000 * engine.decode.steps_s(1, requests=1, kv_tokens=used)
    assert decode_ms == pytest.approx(setting.decode_ms(0.4), rel=1e-5)
    assert decode_ms == pytest.approx(
        np.interp(used, profile["decode_active_kv_tokens"], profile["decode_itl"][:, 1]), rel=1e-5
    )


def test_decisions_are_compared_on_the_history_of_dynamo(bench: Bench) -> None:
    replay, decisions, setting = bench("dynamo_replay"), bench("decisions"), bench("setting")
    # The last prompt shares 8 of its 16 blocks with the first, which is in flight at worker 0 and prefilled. Worker 0
    # would have 8 new blocks and 16 + 8 active ones, worker 1 has 3 + 16 and 3 + 16. If shared blocks counted twice,
    # worker 0 would have 16 + 16 active blocks, and worker 1 would have the lowest cost.
    chains = [
        BlockChain(hashes=tuple(range(16)), block_tokens=BLOCK, tokens=16 * BLOCK),
        BlockChain(hashes=tuple(range(100, 103)), block_tokens=BLOCK, tokens=3 * BLOCK),
        BlockChain(hashes=(*range(8), *range(200, 208)), block_tokens=BLOCK, tokens=16 * BLOCK),
    ]
    logged = [
        [(0.0, 16.0, 16.0), (0.0, 16.0, 16.0)],
        [(0.0, 3.0, 19.0), (0.0, 3.0, 3.0)],
        [(8.0, 8.0, 24.0), (0.0, 19.0, 19.0)],
    ]
    reported = [
        replay.Reported(
            served=setting.Served(
                number=number,
                worker=worker,
                arrival_s=float(number),
                ttft_s=0.5,
                prompt_tokens=chain.tokens,
                cached_tokens=0,
            ),
            finished_s=10.0,
            terms={
                each: replay.Terms(cached=cached, prefill=prefill, decode=decode, cost=prefill + decode)
                for each, (cached, prefill, decode) in enumerate(logged[number])
            },
        )
        for number, (worker, chain) in enumerate(zip((0, 1, 0), chains, strict=True))
    ]
    last = list(decisions.columns(reported, chains))[-1]
    assert last.matched_tokens() == [8 * BLOCK, 0]
    assert last.pending_tokens() == [0, 3 * BLOCK]
    assert last.placed_tokens() == [16 * BLOCK, 3 * BLOCK]
    assert last.distinct_tokens() == [24 * BLOCK, 19 * BLOCK]
    found = decisions.agreements(reported, chains, skipped=2)
    assert {name: (each.same, each.excess_blocks) for name, each in found.items()} == {
        "Dynamo's own choices": (1.0, 0.0),
        "the policy `dynamo`": (1.0, 0.0),
        "with shared blocks counted for each request": (0.0, 6.0),
        "and without unfinished prefills": (0.0, 6.0),
    }


def test_figures_of_served_requests(bench: Bench) -> None:
    served = [
        bench("setting").Served(
            number=n, worker=0, arrival_s=0.0, ttft_s=0.1 * (n + 1), prompt_tokens=100, cached_tokens=10 * n
        )
        for n in range(10)
    ]
    found = bench("report").figures(served)
    assert (found.mean_s, found.p50_s, found.p90_s) == pytest.approx((0.55, 0.5, 0.9))
    assert found.reuse == pytest.approx(0.45)


def test_table_shows_figures_relative_to_round_robin_of_the_same_replay(bench: Bench) -> None:
    report, costs = bench("report"), bench("setting").Costs.PREFILL
    base = report.Figures(mean_s=0.4, p50_s=0.2, p90_s=0.8, reuse=0.1)
    other = report.Figures(mean_s=0.2, p50_s=0.1, p90_s=0.6, reuse=0.25)
    measured = {
        report.Run(costs, 16.0, "Dynamo", "round robin"): [base],
        report.Run(costs, 16.0, "Dynamo", "KV router"): [other, other],
    }
    rows = report.results_table(measured, costs).splitlines()[2:]
    assert rows == [
        "| 16 | Dynamo | round robin | 0.400 | 0.200 | 0.800 | 10.0 |",
        "| 16 | Dynamo | KV router | 0.200 (0.50) | 0.100 (0.50) | 0.600 (0.75) | 25.0 (2.50) |",
    ]


def test_simulation_with_round_robin_uses_the_engines_in_turn(bench: Bench) -> None:
    setting, simulation = bench("setting"), bench("simulation")
    paced = setting.paced(trace_of(*(600 + 10 * number for number in range(16))), 2.0)
    served = simulation.simulate(paced, simulation.Variant(policy="round_robin"), setting.Costs.PREFILL)
    assert [each.worker for each in served] == [*range(8), *range(8)]
    # The first block of 512 tokens is common. An engine of 64-token blocks has computed it for the earlier request.
    assert [each.cached_tokens for each in served] == [0] * 8 + [512] * 8


def test_command_without_dynamo_says_how_to_install_it(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(bench("setting").mooncake_lines(trace_of(*(600 for _ in range(600))))))
    options = ["--quick", "--trace", str(trace), "--dynamo", str(tmp_path / "python")]
    done = CliRunner().invoke(bench("command").yardstick, options)
    assert done.exit_code == 1
    assert "run `make .dynamo/.installed`" in done.output


def test_command_without_trace_names_the_file(bench: Bench, tmp_path: Path) -> None:
    done = CliRunner().invoke(bench("command").yardstick, ["--quick", "--trace", str(tmp_path / "none.jsonl")])
    assert done.exit_code == 1
    assert "none.jsonl" in done.output


@pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is not installed; run `make .dynamo/.installed`")
def test_dynamo_replays_a_trace_like_the_simulation(bench: Bench, tmp_path: Path) -> None:
    setting, replay, simulation = bench("setting"), bench("dynamo_replay"), bench("simulation")
    paced = setting.paced(trace_of(*(600 + 100 * number for number in range(24))), 2.0)
    equal, python = setting.Costs.PREFILL, {"python": PYTHON, "folder": tmp_path}
    theirs = replay.replay(paced, replay.Router.ROUND_ROBIN, costs=equal, **python)
    ours = simulation.simulate(paced, simulation.Variant(policy="round_robin", queues=False), equal)
    assert [each.served.worker for each in theirs] == [each.worker for each in ours]
    assert [each.served.cached_tokens for each in theirs] == [each.cached_tokens for each in ours]
    assert [each.served.ttft_s for each in theirs] == pytest.approx([each.ttft_s for each in ours], abs=0.002)
    logged = replay.replay(paced, replay.Router.KV, costs=equal, logged=True, **python)
    assert all(sorted(each.terms) == list(range(8)) for each in logged)
    chains = [each.chain for each in simulation.router_requests(paced)]
    found = bench("decisions").agreements(logged, chains, skipped=0)
    assert found["Dynamo's own choices"].same == 1.0
    assert found["the policy `dynamo`"].same > 0.9
