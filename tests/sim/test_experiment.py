"""Tests of experiments: the replayed requests, the counted requests, and equal results of equal experiments."""

import pickle
from dataclasses import replace

import pytest

from dualmap_sim import experiment as experiment_module
from dualmap_sim.arrivals import arrivals
from dualmap_sim.cluster import ClusterConfig, ReplicationConfig
from dualmap_sim.experiment import Experiment, Outcome, load_trace, member_ids, run_experiment
from dualmap_sim.presets import PRESETS, slowed
from dualmap_sim.workloads.catalog import UnknownWorkload, Workload

REQUESTS = 120
SMALL = Experiment(workload=Workload(requests=REQUESTS), requests_per_s=4.0, instances=2, warmup=20)


def first_tokens(outcome: Outcome) -> list[float | None]:
    return [record.first_token_s for record in outcome.records]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configurations of the created clusters."""
    made: list[ClusterConfig] = []

    class Watched(experiment_module.Cluster):
        def __init__(self, config: ClusterConfig) -> None:
            made.append(config)
            super().__init__(config)

    monkeypatch.setattr(experiment_module, "Cluster", Watched)
    return made


def test_experiments_with_equal_settings_agree_across_processes() -> None:
    once, again = run_experiment(SMALL), run_experiment(pickle.loads(pickle.dumps(SMALL)))
    assert first_tokens(once) == first_tokens(again)
    assert once.summary == again.summary
    assert once.samples == again.samples
    assert first_tokens(run_experiment(replace(SMALL, workload=Workload(requests=REQUESTS, seed=1)))) != first_tokens(
        once
    )


def test_warm_up_requests_are_served_but_not_counted() -> None:
    outcome = run_experiment(SMALL)
    assert len(outcome.records) == REQUESTS
    assert outcome.summary.requests == REQUESTS - SMALL.warmup
    everything = run_experiment(replace(SMALL, warmup=0)).summary
    assert everything.requests == REQUESTS
    assert everything.hit_rate < outcome.summary.hit_rate, "the caches are cold at first"


@pytest.mark.parametrize("warmup", [-1, REQUESTS])
def test_warm_up_of_all_requests_is_rejected(warmup: int) -> None:
    with pytest.raises(ValueError, match="the trace has only 120 requests"):
        run_experiment(replace(SMALL, warmup=warmup))


def test_load_is_sampled_while_counted_requests_arrive() -> None:
    outcome = run_experiment(replace(SMALL, sample_s=0.25))
    first_s = next(r.arrival.at_s for r in outcome.records if r.arrival.request_id == str(SMALL.warmup))
    last_s = outcome.records[-1].arrival.at_s
    cvs = []
    for sample in outcome.samples:
        one, other = sample.pending_tokens.values()
        if first_s <= sample.at_s <= last_s and one + other:
            cvs.append(abs(one - other) / (one + other))  # The standard deviation divided by the mean.
    assert outcome.samples[-1].at_s > last_s
    assert outcome.summary.pending_cv == pytest.approx(sum(cvs) / len(cvs))


def test_experiment_cuts_prompts_and_scales_arrivals() -> None:
    engine = replace(PRESETS["7b"], input_tokens_max=1000)
    outcome = run_experiment(replace(SMALL, engine=engine))
    assert max(record.arrival.work.prompt_tokens for record in outcome.records) == 1000
    assert outcome.records[-1].arrival.at_s == pytest.approx(REQUESTS / SMALL.requests_per_s)


@pytest.mark.parametrize("block_tokens", [None, 512])
def test_experiment_requests_equal_the_trace_requests(block_tokens: int | None, configs: list[ClusterConfig]) -> None:
    """Experiments reuse the hashed prompts with other arrival times, which must not change the requests."""
    run_experiment(replace(SMALL, requests_per_s=1.0, block_tokens=block_tokens))
    outcome = run_experiment(replace(SMALL, block_tokens=block_tokens))
    trace = load_trace(SMALL)
    router_block_tokens = block_tokens or trace.block_tokens
    fresh = arrivals(
        trace.at_rate(SMALL.requests_per_s),
        router_block_tokens=router_block_tokens,
        engine_block_tokens=SMALL.engine.block_tokens,
    )
    assert tuple(record.arrival for record in outcome.records) == fresh
    assert {config.pool.routing.prefix.block_tokens for config in configs} == {router_block_tokens}


def test_experiment_without_sessions_sends_no_session_names() -> None:
    assert all(record.arrival.session is not None for record in run_experiment(SMALL).records)
    assert all(record.arrival.session is None for record in run_experiment(replace(SMALL, sessions=False)).records)


def test_experiment_pool_matches_its_settings(configs: list[ClusterConfig]) -> None:
    slow = slowed(SMALL.engine, 2.0)
    special = replace(
        SMALL,
        policy="min_ttft",
        slo_ttft_s=2.0,
        engines=(("qwen-1", slow),),
        feedback_delay_s=0.02,
        report_loss=0.1,
        kv_moves=True,
        believed_tokens_per_s=3500.0,
        sample_s=None,
    )
    assert run_experiment(special).samples == ()
    run_experiment(SMALL)
    config, usual = configs
    assert (config.pool.routing.policy, config.pool.slo.ttft_s, config.pool.engine.prefill_tokens_per_second) == (
        "min_ttft",
        2.0,
        3500.0,
    )
    assert (config.engines, config.feedback_delay_s, config.report_loss, config.kv_moves) == (
        {"qwen-1": slow},
        0.02,
        0.1,
        True,
    )
    assert usual.pool.engine.prefill_tokens_per_second == SMALL.engine.prefill.tokens_per_s
    assert usual.pool.engine.cache_tokens == SMALL.engine.cache_tokens
    assert tuple(member.id for member in usual.pool.members) == member_ids(2)


def test_routers_receive_updates_of_other_routers_after_view_delay(configs: list[ClusterConfig]) -> None:
    """Updates leave once per period p and arrive after d. Their age is d at their arrival, and d + p before the next
    update.
    """
    run_experiment(replace(SMALL, routers=3, view_delay_s=0.4))
    run_experiment(SMALL)
    several, one = configs
    assert (len(several.replicas), len(one.replicas)) == (3, 1)
    assert isinstance(several.exchange, ReplicationConfig)
    assert several.exchange.delay_s + several.exchange.period_s / 2 == pytest.approx(0.4)
    assert one.exchange is None


def test_only_several_routers_with_an_owner_exchange_messages(configs: list[ClusterConfig]) -> None:
    four = replace(SMALL, routers=4, hop_delay_s=0.003)
    for experiment in (four, replace(four, owner_decides=False), replace(four, routers=1)):
        run_experiment(experiment)
    assert [config.hop_delay_s for config in configs] == [0.003, None, None]


def test_members_have_distinct_addresses(configs: list[ClusterConfig]) -> None:
    run_experiment(replace(SMALL, instances=300, policy="round_robin", sample_s=None))
    assert len({member.endpoint for member in configs[0].pool.members}) == 300


def test_oracle_runs_with_the_same_function_as_policies() -> None:
    outcome = run_experiment(replace(SMALL, policy="limit"))
    assert outcome.summary.requests == REQUESTS - SMALL.warmup
    assert outcome.samples
    assert outcome.summary.ttft_p90_s <= run_experiment(replace(SMALL, policy="round_robin")).summary.ttft_p90_s


def test_oracle_for_equal_engines_rejects_different_engines() -> None:
    with pytest.raises(ValueError, match="the bound limit requires equal engines"):
        run_experiment(replace(SMALL, policy="limit", engines=(("qwen-0", SMALL.engine),)))


def test_unknown_workload_is_rejected() -> None:
    with pytest.raises(UnknownWorkload):
        run_experiment(replace(SMALL, workload=Workload(name="nobody's")))


def test_experiment_reports_every_first_token() -> None:
    told: list[None] = []
    run_experiment(SMALL, on_answer=lambda: told.append(None))
    assert len(told) == REQUESTS


@pytest.mark.parametrize("policy", ["round_robin", "limit"])
def test_run_that_cannot_meet_the_slo_ends_early(policy: str) -> None:
    overloaded = replace(SMALL, policy=policy, requests_per_s=40.0)
    early = run_experiment(overloaded, stop_below=0.9)
    assert early.gave_up
    assert sum(record.first_token_s is not None for record in early.records) < REQUESTS
    to_the_end = run_experiment(overloaded)
    assert not to_the_end.gave_up
    assert to_the_end.summary.slo_attainment < 0.9


@pytest.mark.parametrize("rate", [1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_run_ends_early_exactly_if_it_misses_the_slo(rate: float) -> None:
    at_rate = replace(SMALL, requests_per_s=rate, policy="round_robin")
    assert run_experiment(at_rate, stop_below=0.9).gave_up == (run_experiment(at_rate).summary.slo_attainment < 0.9)
