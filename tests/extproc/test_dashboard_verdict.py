"""Tests of the dashboard's verdict: whether the pool meets its SLO, and its problems."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.engines.source import SourceState
from dualmap.pools.pool import MemberState
from dualmap.requests import EndpointStatus, EventsStatus, FirstToken, PoolSnapshot
from dualmap.router import PoolRouter
from dualmap_extproc.errors import no_endpoint
from dualmap_extproc.telemetry.dashboard.history import PoolHistory
from dualmap_extproc.telemetry.dashboard.verdict import Level, Reach, Verdict, judge
from extproc.metrics_pages import completion

POOL = builders.pool(4)
NOW = 1000.0


def status(count: int = 4, **changes: dict[str, object]) -> PoolSnapshot:
    """Return a pool without load; ``m_1={"in_flight": 2}`` changes an instance."""
    plain = PoolRouter(builders.pool(count)).status()
    names = {name.replace("_", "-"): change for name, change in changes.items()}
    endpoints = tuple(changed(each, names.get(each.id, {})) for each in plain.endpoints)
    return replace(plain, endpoints=endpoints)


def changed(endpoint: EndpointStatus, change: dict[str, object]) -> EndpointStatus:
    return replace(endpoint, **change)  # type: ignore[arg-type]  # what a test says of it


def past(*, met: int = 0, missed: int = 0, seconds_ago: float = 1.0) -> PoolHistory:
    history = PoolHistory()
    for number in range(met + missed):
        token = FirstToken(member="m-0", ttft_s=1.0, predicted_ttft_s=1.0, within_slo=number < met)
        history.first_token(NOW - seconds_ago, token)
    return history


def verdict(
    history: PoolHistory,
    now: PoolSnapshot | None = None,
    *,
    reach: Reach | None = None,
    wanted: float | None = None,
    unknown: str = "",
) -> Verdict:
    at = now or status(m_0={"in_flight": 1})
    return judge(POOL, at, history.view(NOW), reach or Reach(), wanted=wanted, unknown=unknown)


def texts(problems: Sequence[object]) -> str:
    return " ".join(str(problem) for problem in problems)


def test_verdict_of_pool_that_meets_its_slo_is_ok() -> None:
    found = verdict(past(met=95, missed=5))
    assert found.level is Level.OK
    assert found.headline == (
        "llm/qwen meets its SLO: 95% of first tokens arrived within 5 s in the last minute (goal 90%)."
    )
    assert found.problems == ()


def test_verdict_of_pool_that_misses_its_slo_is_bad() -> None:
    found = verdict(past(met=89, missed=11))
    assert found.level is Level.BAD
    assert found.headline.startswith("llm/qwen misses its SLO: 89% of first tokens arrived")


def test_verdict_attainment_is_never_rounded_up_to_its_target() -> None:
    assert "misses its SLO: 89.9% of" in verdict(past(met=89_999, missed=10_001)).headline


def test_verdict_with_few_first_tokens_uses_five_minutes() -> None:
    history = past(missed=30, seconds_ago=100)
    history.first_token(NOW, FirstToken(member="m-0", ttft_s=1.0, predicted_ttft_s=1.0, within_slo=True))
    found = verdict(history)
    assert found.level is Level.BAD
    assert "in the last 5 minutes" in found.headline


def test_verdict_of_pool_without_traffic_is_idle() -> None:
    found = verdict(PoolHistory(), status())
    assert (found.level, found.headline) == (
        Level.IDLE,
        "llm/qwen is idle and received no request in the last 5 minutes.",
    )


def test_verdict_of_pool_busy_only_minutes_ago_is_idle() -> None:
    found = verdict(past(met=30, seconds_ago=120), status())
    assert found.level is Level.IDLE
    assert "no request in the last minute" in found.headline


def test_verdict_of_unstreamed_responses_shows_no_attainment() -> None:
    found = verdict(PoolHistory(), status(m_0={"in_flight": 3}))
    assert found.level is Level.IDLE
    assert "no streamed response started" in found.headline


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (status(0), "llm/qwen has no instances."),
        (
            replace(status(2, m_0={"state": "Draining"}, m_1={"state": "Draining"}), held=3),
            "llm/qwen has 2 instances, but no instance accepts requests; 3 requests queued.",
        ),
    ],
)
def test_verdict_of_pool_without_serving_member_is_bad(now: PoolSnapshot, says: str) -> None:
    found = verdict(past(met=100), now)
    assert found.level is Level.BAD
    assert found.headline.endswith(says)


def test_verdict_with_rejections_above_the_slo_is_bad() -> None:
    history = past(met=100)
    for _ in range(3):
        history.refused(NOW - 5, no_endpoint("llm/qwen"))
    found = verdict(history)
    assert found.level is Level.BAD
    assert found.headline.startswith("llm/qwen rejects requests. llm/qwen meets its SLO")
    assert "3 requests rejected in the last 5 minutes (3 no_endpoint), 3 in the last minute." in texts(found.problems)


def test_verdict_with_past_rejections_has_a_warning() -> None:
    history = past(met=100, seconds_ago=201)
    history.refused(NOW - 200, no_endpoint("llm/qwen"))
    found = verdict(history)
    assert found.level is Level.WARN
    assert "1 request rejected" in texts(found.problems)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"suspended": True}, "m-1 is suspended after several failed requests in a row."),
        ({"pending_prefill_tokens": 30_000, "held_prefill_tokens": 12_000}, "m-1 has more pending prefill than"),
        ({"prefill_tokens_per_second": 700.0}, "m-1 prefills at less than half of the median 7,000 tokens/s"),
    ],
)
def test_verdict_with_faulty_member_has_a_warning(change: dict[str, object], says: str) -> None:
    found = verdict(past(met=100), status(m_1=change))
    assert found.level is Level.WARN
    (problem,) = found.problems
    assert says in problem.text


def test_verdict_shows_joining_and_draining_members_as_information() -> None:
    joining, draining = {"state": MemberState.JOINING.value}, {"state": MemberState.DRAINING.value}
    found = verdict(past(met=100), status(m_0={"in_flight": 1}, m_1=joining, m_2=draining))
    assert found.level is Level.OK
    assert [problem.text for problem in found.problems] == ["m-1 is joining.", "m-2 is draining."]


def test_verdict_shows_when_a_member_leaves() -> None:
    leaving = {"state": MemberState.DRAINING.value, "leave_at_s": 1_764_277_200.0}
    found = verdict(past(met=100), status(m_0={"in_flight": 1}, m_2=leaving))
    assert found.level is Level.OK
    assert [problem.text for problem in found.problems] == ["m-2 is draining and leaves at 2025-11-27T21:00:00Z."]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": EngineProfile(asleep=True)}, "m-1 is asleep."),
        (
            {"engine": EngineProfile(reason="/metrics: no connection")},
            "The router cannot read everything about the engines of m-1 (m-1: /metrics: no connection).",
        ),
        (
            {"events": EventsStatus(state=SourceState.FAILED, reason="the connection was lost")},
            "The KV events of m-1 are incomplete (m-1: the connection was lost).",
        ),
        (
            {"events": EventsStatus(state=SourceState.PARTIAL, reason="messages 0 to 3 are lost")},
            "The KV events of m-1 are incomplete (m-1: messages 0 to 3 are lost).",
        ),
        (
            {"events": EventsStatus(state=SourceState.CONNECTING, reason="port 5557: connection refused")},
            "The KV events of m-1 are incomplete (m-1: port 5557: connection refused).",
        ),
        (
            {"events": EventsStatus(state=SourceState.OFF, reason="the engine reports no KV events")},
            "The KV events of m-1 are incomplete (m-1: the engine reports no KV events).",
        ),
    ],
)
def test_verdict_shows_engine_states_as_information(change: dict[str, object], says: str) -> None:
    found = verdict(past(met=100), status(m_0={"in_flight": 1}, m_1=change))
    assert found.level is Level.OK
    assert [problem.text for problem in found.problems] == [says]


def test_verdict_warns_of_engines_that_do_not_fit_the_pool() -> None:
    unfit = {"engine": EngineProfile(mismatch="serves [other], not m")}
    (problem,) = verdict(past(met=100), status(m_1=unfit)).problems
    assert (problem.level, problem.text) == (Level.WARN, "m-1 does not fit the pool (m-1: serves [other], not m).")
    (problem,) = verdict(past(met=100), status(m_1=unfit, m_2=unfit)).problems
    assert problem.text == "m-1 and m-2 do not fit the pool (m-1: serves [other], not m)."


def test_verdict_names_one_reason_of_many_engines() -> None:
    unread = {f"m_{number}": {"engine": EngineProfile(reason="x" * 500)} for number in range(5)}
    (problem,) = verdict(past(met=100), status(6, **unread)).problems
    assert problem.text.count("x" * 119) == 1
    assert "m-0, m-1 and 3 other instances (m-0: xxx" in problem.text


def test_verdict_with_many_affected_members_shows_their_number() -> None:
    now = status(12, **{f"m_{number}": {"suspended": True} for number in range(5)})
    assert "m-0, m-1 and 3 other instances are suspended" in texts(verdict(past(met=100), now).problems)


def test_verdict_shows_failures_only_of_current_members() -> None:
    history = past(met=100)
    for member in ("m-3", "m-3", "gone"):
        history.failed(NOW - 3, completion(member, predicted=0, measured=None))
    assert "m-3 failed 2 requests in the last 5 minutes." in texts(verdict(history).problems)


def test_verdict_with_mispredicted_cache_hits_has_a_warning() -> None:
    history = past(met=100)
    history.measured(NOW, completion("m-0", predicted=20_000, measured=8_000))
    assert "had only 40% of the predicted tokens in their caches" in texts(verdict(history).problems)
    few = past(met=100)
    few.measured(NOW, completion("m-0", predicted=2_000, measured=0))
    assert not verdict(few).problems


def test_verdict_with_fewer_members_than_desired_has_a_warning() -> None:
    assert "needs 6 instances to meet its SLO, but has only 4." in texts(verdict(past(met=9), wanted=5.2).problems)
    assert not verdict(past(met=9), wanted=4.2).problems


def test_verdict_with_unknown_demand_has_a_warning() -> None:
    found = verdict(past(met=100), unknown="shared state is unreachable")
    assert found.level is Level.WARN
    assert "total demand of all routers is unknown: shared state is unreachable." in texts(found.problems)


def test_verdict_shows_lost_redis_once_despite_unknown_demand() -> None:
    unknown = "shared state is unreachable"
    found = verdict(past(met=100), reach=Reach(store_lost_s=12.4), unknown=unknown)
    assert [problem.text.partition(":")[0] for problem in found.problems] == ["Redis has been unreachable for 12 s"]
    assert len(verdict(past(met=100), reach=Reach(store_lost_s=1.0), unknown=unknown).problems) == 1


def test_verdict_lists_the_most_severe_problem_first() -> None:
    history = past(met=100)
    for _ in range(20):
        history.refused(NOW, no_endpoint("llm/qwen"))
    found = verdict(history, status(m_1={"state": "Joining"}, m_2={"suspended": True}))
    assert [problem.level for problem in found.problems] == [Level.BAD, Level.WARN, Level.OK]


@pytest.mark.parametrize(
    ("reach", "text"),
    [
        (
            Reach(store_lost_s=12.4),
            "Redis has been unreachable for 12 s: this router uses only its own state.",
        ),
        (
            Reach(watch_ages_s={"inferencepools": 3.0, "pods": 190.0}),
            "The Kubernetes API has sent no data about pods for 3 minutes: this router uses the last received state.",
        ),
        (
            Reach(kv_store_lost=True),
            "The KV store fails: this router counts only the KV cache of instances. /pools has the reason.",
        ),
    ],
)
def test_verdict_with_stale_data_source_has_a_warning(reach: Reach, text: str) -> None:
    found = verdict(past(met=100), reach=reach)
    assert found.level is Level.WARN
    assert [problem.text for problem in found.problems] == [text]


def test_verdict_ignores_short_gaps_of_data_sources() -> None:
    reach = Reach(store_lost_s=1.0, watch_ages_s={"inferencepools": 46.0, "pods": 0.0})
    assert verdict(past(met=100), reach=reach).problems == ()
