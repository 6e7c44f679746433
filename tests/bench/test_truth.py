"""Tests of the benchmark of knowledge: its cases, its figures, and a tiny run."""

import importlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dualmap_sim.arrivals import Arrival
from dualmap_sim.cluster import Cluster
from dualmap_sim.events import Bypass, Fail, PoolChange
from dualmap_sim.records import Record

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]
REQUESTS = 48


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def test_truth_bench_measures_every_kind_of_knowledge(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench("truth.command")
    monkeypatch.setattr(command, "_QUICK_REQUESTS", REQUESTS)
    monkeypatch.setattr(command, "workloads", lambda: ("default",))
    files = {"--json": tmp_path / "truth.json", "--plot": tmp_path / "truth.png"}
    options = [str(part) for option in files.items() for part in option]
    done = CliRunner().invoke(command.truth, ["--quick", "--case", "small", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["knowledge", "round robin", "records", "records and usage", "KV events"]
    assert [each["case"] for each in json.loads(files["--json"].read_text())] == ["small"] * 4
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_truth_goodput_is_the_highest_rate_that_attains_the_slo(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, search, measures = bench("truth.cases"), bench("truth.goodput"), bench("truth.measures")
    run = cases.Run(
        case=cases.Case.AMPLE, knowledge=cases.Knowledge.USAGE, workload="default", sample=0, requests=0, rate=5.0
    )
    unmeasured = dict.fromkeys((each.name for each in fields(measures.Figures)), 0.0)

    def measure(each: Any) -> Any:
        return measures.Figures(**(unmeasured | {"within_slo": 0.9 if each.rate <= 12.0 else 0.8}))

    monkeypatch.setattr(search, "measure", measure)
    assert 12.0 / 1.02 < search.goodput(run) <= 12.0
    table = search.goodput_table([(run, 12.0), (replace(run, workload="conversation"), 3.0)])
    assert table.splitlines()[-1] == "| ample | records and usage | 3.00 | 12.00 |"


def test_truth_cases_differ_only_in_what_the_router_knows(bench: Bench) -> None:
    cases = bench("truth.cases")
    for case in cases.Case:
        configs = {kind: cases.cluster_of(_run(cases, case, kind)) for kind in cases.kinds(case)}
        assert len({id(asked) for _, asked in configs.values()}) == 1
        assert len({config.engine for config, _ in configs.values()}) == 1
        assert {kind for kind, (config, _) in configs.items() if config.pool.engine.kv_events.enabled} == {
            cases.Knowledge.EVENTS
        }
        assert {kind for kind, (config, _) in configs.items() if not config.reports_cached_tokens} == {
            cases.Knowledge.RECORDS
        }


def test_truth_restart_case_restarts_each_engine_once(bench: Bench) -> None:
    cases = bench("truth.cases")
    config, _ = cases.cluster_of(_run(cases, cases.Case.RESTARTS, cases.Knowledge.RECORDS))
    members = [event.member for event in config.events if isinstance(event, Fail)]
    assert members == [member.id for member in config.pool.members]
    told, _ = cases.cluster_of(_run(cases, cases.Case.RESTARTS, cases.Knowledge.REFERENCE))
    last = [event.pool for event in told.events if isinstance(event, PoolChange)][-1]
    assert {member.incarnation for member in last.members} == {"2"}


def test_truth_bypass_case_divides_the_requests(bench: Bench) -> None:
    cases = bench("truth.cases")
    config, asked = cases.cluster_of(_run(cases, cases.Case.BYPASS, cases.Knowledge.EVENTS))
    assert (len(asked), sum(isinstance(event, Bypass) for event in config.events)) == (2 * REQUESTS // 3, REQUESTS // 3)


def test_truth_figures_compare_prediction_and_measurement(bench: Bench) -> None:
    cases, measures = bench("truth.cases"), bench("truth.measures")
    _, asked = cases.cluster_of(_run(cases, cases.Case.AMPLE, cases.Knowledge.RECORDS))
    records = [
        _record(arrival, predicted=predicted, cached=cached)
        for arrival, (predicted, cached) in zip(asked, ((256, 0), (256, 64), (128, 256), (0, 0)), strict=False)
    ]
    figures = measures.figures(records, block_tokens=128)
    assert figures.stale_rate == 1 / 3
    assert figures.excess == (256 + 192) / 640
    assert (figures.off, figures.off_fine) == (2 / 4, 3 / 4)
    assert isnan(measures.figures(records[3:], block_tokens=128).excess)


def test_truth_events_predict_what_bypassing_requests_cached(bench: Bench) -> None:
    cases, measures = bench("truth.cases"), bench("truth.measures")
    off = {}
    for kind in (cases.Knowledge.USAGE, cases.Knowledge.EVENTS):
        config, asked = cases.cluster_of(_run(cases, cases.Case.BYPASS, kind, requests=300))
        off[kind] = measures.figures(Cluster(config).run(asked), block_tokens=128).off
    assert off[cases.Knowledge.EVENTS] < 0.01 < off[cases.Knowledge.USAGE]


def _run(cases: ModuleType, case: object, knowledge: object, requests: int = REQUESTS) -> object:
    return cases.Run(case=case, knowledge=knowledge, workload="default", sample=0, requests=requests, rate=5.0)


def _record(arrival: Arrival, *, predicted: int, cached: int) -> Record:
    at_s = arrival.at_s
    return Record(
        arrival=arrival,
        router=0,
        predicted_tokens=predicted,
        cached_tokens=cached,
        first_token_s=at_s + 1.0,
        finished_s=at_s + 2.0,
    )
