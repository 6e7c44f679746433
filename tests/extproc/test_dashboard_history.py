"""Tests of the dashboard's history: the counts of each window, and the bounds."""

import pytest

import builders
from dualmap.receipt import SessionHost
from dualmap.requests import Decision, FirstToken
from dualmap.router import PoolRouter
from dualmap_extproc.errors import model_not_found, no_endpoint
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observations import (
    Arrival,
    Ended,
    FanOut,
    FirstTokenSeen,
    Measured,
    Rejected,
    Routed,
)
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.history import (
    DECISIONS,
    STEPS,
    TTFT_BOUNDS_S,
    EndpointPast,
    PoolHistory,
    percentile,
)
from extproc.metrics_pages import completion


def decision(number: int = 0) -> Decision:
    outcome = (
        PoolRouter(builders.pool(2))
        .on_request(0.0, builders.request(f"r-{number}", builders.text_of(1000, "a")))
        .answer
    )
    assert isinstance(outcome, Decision)
    return outcome


def first_token(ttft_s: float, *, within_slo: bool = True, member: str = "m-0") -> FirstToken:
    return FirstToken(member=member, ttft_s=ttft_s, predicted_ttft_s=ttft_s, within_slo=within_slo)


def test_history_sums_one_and_five_minutes_separately() -> None:
    history = PoolHistory()
    history.routed(0.0, decision())
    history.refused(150.0, no_endpoint("llm/qwen"))
    history.routed(295.0, decision())
    view = history.view(299.0)
    assert (view.minute.requests, view.minute.refused) == (1, 0)
    assert (view.window.requests, view.window.refused) == (2, 1)
    assert view.refusals == {"no_endpoint": 1}
    (rule,) = view.rules
    assert view.rules[rule] == 2
    later = history.view(2000.0)
    assert (later.window.requests, later.rules, later.endpoints, later.refusals) == (0, {}, {}, {})


def test_history_series_have_a_point_per_step_or_a_gap() -> None:
    history = PoolHistory()
    history.first_token(1000.0, first_token(0.5))
    history.first_token(1001.0, first_token(9.0, within_slo=False))
    steps = history.view(1025.0).steps
    assert len(steps) == STEPS
    assert [(step.first_tokens, step.slo_met) for step in steps[-4:]] == [(0, 0), (2, 1), (0, 0), (0, 0)]
    assert steps[-1].ttft_p50_s is None
    assert steps[-3].ttft_p50_s == pytest.approx(0.5, rel=0.3)
    assert steps[-3].ttft_p90_s == pytest.approx(9.0, rel=0.3)


def test_history_counts_hits_per_member_and_in_total() -> None:
    history = PoolHistory()
    sent = decision()
    history.routed(0.0, sent)
    history.measured(2.0, completion("gone", predicted=300, measured=150))
    view = history.view(3.0)
    past = view.endpoints[sent.receipt.chosen]
    assert (past.requests, past.prompt_tokens, past.hit_rate_predicted, past.hit_rate_measured) == (1, 1000, 0.0, None)
    assert (view.total.requests, view.total.checked_cached_tokens, view.total.measured_cached_tokens) == (1, 300, 150)


def test_history_counts_fetched_tokens_and_moved_sessions_at_their_new_member() -> None:
    history, (old, new) = PoolHistory(), ("m-0", "m-1")
    sent = decision()
    for host, fetched in ((SessionHost(old, "10.0.0.1:8000"), 800), (SessionHost(new, ""), None)):
        receipt = sent.receipt._replace(chosen=new, host=host, fetch_tokens=fetched)
        history.routed(0.0, sent._replace(receipt=receipt))
    view = history.view(3.0)
    past = view.endpoints[new]
    assert (past.fetch_tokens, past.fetched, past.moved_sessions) == (800, 0.4, 1)
    assert (view.total.fetched, view.total.moved_sessions) == (0.4, 1)


def test_history_measured_hit_rate_corrects_the_predicted_rate() -> None:
    # The router predicted 600 cached tokens of 1000. Engines reported on 300 of these 600 tokens, and had cached half.
    past = EndpointPast(
        prompt_tokens=1000, predicted_cached_tokens=600, checked_cached_tokens=300, measured_cached_tokens=150
    )
    assert (past.hit_rate_predicted, past.hit_rate_measured) == (0.6, pytest.approx(0.3))
    assert EndpointPast(prompt_tokens=1000, predicted_cached_tokens=600).hit_rate_measured is None


def test_history_attainment_is_kept_per_member() -> None:
    history = PoolHistory()
    history.first_token(0.0, first_token(1.0, member="m-1"))
    history.first_token(0.0, first_token(9.0, within_slo=False, member="m-1"))
    history.failed(0.0, completion("m-1", predicted=0, measured=None))
    past = history.view(1.0).endpoints["m-1"]
    assert (past.attainment, past.failed) == (0.5, 1)


def test_history_keeps_a_bounded_number_of_decisions_and_steps() -> None:
    history = PoolHistory()
    sent = decision()
    for number in range(3 * DECISIONS):
        history.routed(float(number * 10), sent)
    happenings = history.view(3 * DECISIONS * 10.0).happenings
    assert [each.number for each in happenings] == list(range(3 * DECISIONS - 1, 2 * DECISIONS - 1, -1))
    assert len(history._steps) == STEPS
    assert len(history._minutes) == 5


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_history_percentiles_are_within_their_histogram_bucket(share: float) -> None:
    history = PoolHistory()
    values = [0.02 * 1.07**index for index in range(100)]
    for value in values:
        history.first_token(0.0, first_token(value))
    found = percentile(history.view(1.0).window.ttfts, share)
    assert found == pytest.approx(values[round(share * 100) - 1], rel=0.27)


def test_history_ttft_above_all_bounds_is_counted() -> None:
    history = PoolHistory()
    history.first_token(0.0, first_token(1e-6))
    history.first_token(0.0, first_token(1e6))
    window = history.view(1.0).window
    assert (window.ttfts[0], window.ttfts[-1]) == (1, 1)
    assert percentile(window.ttfts, 1.0) == pytest.approx(TTFT_BOUNDS_S[-1])
    assert percentile([0] * len(window.ttfts), 0.5) is None


class Recorded:
    """Histories, and the fan-out that sends observations to the histories."""

    def __init__(self) -> None:
        self.now = 0.0
        self.histories = Histories(clock=lambda: self.now)
        observations = FanOut()
        self.histories.subscribe(observations)
        self.report = observations.report

    def routed(self, pool: str) -> None:
        arrival = Arrival(at_s=self.now, headers={})
        self.report(Routed(now=self.now, pool=pool, decision=decision(), arrival=arrival))


def test_histories_keep_each_observation_at_its_time() -> None:
    desk = Recorded()
    pool, refused = "llm/qwen", no_endpoint("llm/qwen")
    ended = completion("m-0", predicted=3, measured=1)
    desk.now = 500.0
    desk.report(Rejected(now=10.0, pool=pool, refused=refused, arrival=None))
    desk.report(FirstTokenSeen(now=290.0, pool=pool, first_token=first_token(1.0)))
    for ending in Ending:
        desk.report(Ended(now=290.0, pool=pool, ending=ending, completion=ended))
    desk.report(Measured(now=290.0, pool=pool, completion=ended))
    desk.now = 295.0
    view = desk.histories.view(pool)
    assert (view.minute.refused, view.window.refused, view.minute.first_tokens) == (0, 1, 1)
    assert (view.total.failed, view.total.checked_cached_tokens, view.total.measured_cached_tokens) == (1, 3, 1)


def test_histories_are_separate_per_pool_and_drop_removed_pools() -> None:
    desk = Recorded()
    desk.routed("llm/old")
    assert desk.histories.view("llm/old").minute.requests == 1
    assert desk.histories.view("llm/new").minute.requests == 0
    desk.now = 5000.0
    desk.routed("llm/new")
    assert list(desk.histories._pools) == ["llm/new"]


def test_histories_ignore_rejections_without_a_pool() -> None:
    desk = Recorded()
    desk.report(Rejected(now=0.0, pool="", refused=model_not_found("<img src=x>"), arrival=None))
    assert not desk.histories._pools
