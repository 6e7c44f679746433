"""Tests of the demo's figures from constructed outcomes: numbers, tables and charts."""

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap_cli.demo.chart import draw
from dualmap_cli.demo.plan import make_plan
from dualmap_cli.demo.predictions import EventCounts, Prediction, read_event_counts, read_prediction
from dualmap_cli.demo.printing import announcement, as_document, lag_note, notes, preamble, predictions, table
from dualmap_cli.demo.replay import Outcome
from dualmap_cli.demo.report import PolicyRun, coefficient_of_variation, percentile, report
from dualmap_cli.demo.sampling import LoadSample

SPEED = 4.0


@pytest.fixture
def plan(tmp_path: Path):
    return make_plan(
        engines=2,
        routers=1,
        policies=("round_robin", "dualmap"),
        trace_file=None,
        requests=40,
        rate=None,
        speed=SPEED,
        seed=0,
        out=tmp_path,
    )


def outcome(*, due_s: float = 0.0, ttft_s: float = 0.1, error: str | None = None, lag_s: float = 0.0) -> Outcome:
    """Times are in seconds of the wall clock; each request ends one second after its first token."""
    return Outcome(
        due_s=due_s,
        sent_s=due_s + lag_s,
        first_byte_s=due_s + lag_s + ttft_s,
        finished_s=due_s + lag_s + ttft_s + 1.0,
        prompt_tokens=100,
        cached_tokens=25,
        error=error,
    )


def run(*outcomes: Outcome, samples: tuple[LoadSample, ...] = (), policy: str = "dualmap") -> PolicyRun:
    return PolicyRun(policy=policy, outcomes=outcomes, samples=samples, wall_s=9.0)


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 5), (0.9, 9), (0.99, 10), (0.0, 1), (1.0, 10)], ids=["p50", "p90", "p99", "p0", "p100"]
)
def test_percentile_is_nearest_rank(share, value):
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == value


def test_percentile_of_an_empty_list_is_none():
    assert percentile([], 0.5) is None


def test_coefficient_of_variation_matches_paper_equation_1():
    assert coefficient_of_variation(LoadSample(pending_tokens=(100.0, 300.0))) == pytest.approx(0.5)
    assert coefficient_of_variation(LoadSample(pending_tokens=(7.0, 7.0))) == 0.0
    assert coefficient_of_variation(LoadSample(pending_tokens=(0.0, 0.0))) is None


def test_report_uses_simulated_seconds_and_inclusive_slo(plan):
    # 5 model seconds are 1.25 wall seconds at four times the speed.
    figures = report(run(*(outcome(ttft_s=ttft_s) for ttft_s in (0.25, 0.5, 1.25, 1.5))), plan)

    assert (figures.ttft_p50_s, figures.ttft_p90_s, figures.e2e_p50_s) == (2.0, 6.0, 6.0)
    assert figures.slo_attainment == 0.75


def test_report_counts_failed_request_as_slo_miss_without_ttft(plan):
    figures = report(run(outcome(ttft_s=0.25), outcome(ttft_s=0.01, error="status 503")), plan)

    assert figures.slo_attainment == 0.5
    assert figures.ttft_p50_s == 1.0
    assert figures.errors == {"status 503": 1}
    assert figures.hit_rate == 0.25


def test_report_without_successful_requests_has_no_times(plan):
    figures = report(run(outcome(error="x"), outcome(error="x")), plan)

    assert (figures.ttft_p99_s, figures.slo_attainment, figures.hit_rate) == (None, 0.0, 0.0)
    assert figures.errors == {"x": 2}
    assert "2 x x" in table([figures])


def test_report_excludes_idle_samples_from_load_balance(plan):
    samples = tuple(LoadSample(pending_tokens=pending) for pending in ((0.0, 0.0), (100.0, 300.0), (0.0, 200.0)))

    figures = report(run(outcome(), samples=samples), plan)

    assert figures.pending_cv == pytest.approx((0.5 + 1.0) / 2)
    assert figures.pending_tokens_mean == pytest.approx((0 + 200 + 100) / 3)


def test_report_warns_of_a_late_generator(plan):
    on_time = report(run(*(outcome(lag_s=0.01) for _ in range(50))), plan)
    late = report(run(*(outcome(lag_s=0.2) for _ in range(50))), plan)

    assert late.send_lag_p99_wall_s == pytest.approx(0.2)
    assert "warning" not in lag_note([on_time], plan)
    assert "within 200 ms (wall)" in lag_note([on_time, late], plan)
    assert "warning" in lag_note([on_time, late], plan)


@pytest.mark.parametrize(
    ("late", "told"),
    [((0, 1), True), ((0, 2), False), ((0,), False)],
    ids=["99 % and more", "98 % once", "nothing to compare"],
)
def test_report_warns_if_the_load_cannot_distinguish_policies(plan, late, told):
    slow, fast = outcome(ttft_s=5.1 / SPEED), outcome()
    reports = [report(run(*[slow] * count, *[fast] * (100 - count)), plan) for count in late]

    assert ("too light or too short to tell the policies apart" in notes(reports, plan)) is told
    assert lag_note(reports, plan) in notes(reports, plan)


def test_announced_run_time_covers_all_replays(plan):
    assert f"about {2 * plan.trace.duration_s / SPEED:.0f} s in all, plus start-up" in announcement(plan)


def test_report_json_contains_runs_and_workload(plan):
    document = json.loads(json.dumps(as_document(plan, [report(run(outcome()), plan)])))

    assert document["workload"]["name"] == "default"
    assert document["workload"]["requests"] == 40
    assert document["engines"] == 2
    assert 0 < document["load"]["ideal_reuse"] < document["load"]["without_reuse"]
    assert {
        "policy",
        "qps",
        "instances",
        "requests",
        "ttft_p50_s",
        "ttft_p90_s",
        "ttft_p99_s",
        "slo_attainment",
    } <= set(document["runs"][0])
    assert {"hit_rate", "pending_cv", "errors", "wall_s"} <= set(document["runs"][0])


def test_report_table_is_aligned_and_preamble_contains_the_load(plan):
    figures = [report(run(outcome(), policy=policy), plan) for policy in plan.policies]

    lines = table(figures).splitlines()

    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines[2:]] == ["round_robin", "dualmap"]
    assert f"{plan.load.without_reuse:.0%} of their capacity" in preamble(plan)


RECEIPT = 'chosen="m-1", rule="pair", matched=%d, prompt=%d, key=2, source="%s"'


def test_prediction_is_the_share_of_the_receipts_prompt():
    assert read_prediction(RECEIPT % (50, 100, "events")) == Prediction(cached_share=0.5, from_events=True)
    assert read_prediction(RECEIPT % (0, 0, "records")) == Prediction(cached_share=0.0, from_events=False)
    assert read_prediction("") is None
    assert read_prediction('chosen="m-1"') is None


def test_event_counts_are_sums_over_the_routers():
    page = """dualmap_kv_event_state{endpoint="engine-0",pool="demo/qwen",state="Live"} 1.0
dualmap_kv_event_state{endpoint="engine-0",pool="demo/qwen",state="Failed"} 0.0
dualmap_kv_event_state{endpoint="engine-1",pool="demo/qwen",state="Partial"} 1.0
dualmap_kv_events_total{kind="stored",pool="demo/qwen"} 12.0
dualmap_kv_events_total{kind="removed",pool="demo/qwen"} 5.0
dualmap_kv_event_gaps_total{pool="demo/qwen"} 2.0
"""
    assert read_event_counts([page, page]) == EventCounts(
        states={"Live": 2, "Partial": 2}, stored=24, removed=10, gaps=4
    )
    assert read_event_counts([]) == EventCounts()


def test_report_compares_predicted_with_measured_cached_tokens(plan):
    shares = (0.25, 0.0, 0.9, 1.0)
    events = EventCounts(states={"Live": 2}, stored=7)
    outcomes = [
        replace(
            outcome(),
            prompt_tokens=1000,
            cached_tokens=0 if number == 3 else 250,
            prediction=Prediction(cached_share=share, from_events=number > 0),
        )
        for number, share in enumerate(shares)
    ]
    measured = replace(run(*outcomes), events=events)

    assert report(measured, plan).predictions is None
    (figures,) = reports = [report(measured, replace(plan, kv_events=True))]
    assert figures.predictions is not None
    assert (figures.predictions.as_predicted, figures.predictions.from_events) == (0.25, 0.75)
    assert (figures.predictions.predicted_hits, figures.predictions.stale_hits) == (3, 1)
    assert "1 of 3 predicted hits found nothing" in predictions(reports)
    assert "events of the engines: 2 Live; 7 blocks stored, 0 removed, 0 gaps" in predictions(reports)
    document = json.loads(json.dumps(as_document(plan, reports)))
    assert document["runs"][0]["predictions"]["events"] == {"states": {"Live": 2}, "stored": 7, "removed": 0, "gaps": 0}


def test_results_without_kv_events_have_no_predictions(plan):
    reports = [report(run(outcome()), plan)]

    assert predictions(reports) == ""
    assert "predictions" not in as_document(plan, reports)["runs"][0]


def png_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a PNG; checks every chunk."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    at, kinds = 8, []
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 4 : at + 8 + length]
        assert zlib.crc32(body) == struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0]
        kinds.append(kind)
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.parametrize("failed", [False, True], ids=["as usual", "a policy under which every request failed"])
def test_demo_chart_is_written_as_png(plan, failed):
    plan.out.mkdir(exist_ok=True)
    good = run(*(outcome(due_s=n / 4, ttft_s=0.1 + n / 40) for n in range(40)), policy="round_robin")
    other = run(*(outcome(error="x" if failed else None) for _ in range(40)))
    runs = [good, other]

    draw(plan.out / "demo.png", plan, runs, [report(each, plan) for each in runs])

    width, height = png_size(plan.out / "demo.png")
    assert width > 1000
    assert height > 600
