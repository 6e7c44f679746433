"""Tests of prefill and decode apart in virtual time."""

from dataclasses import replace

import pytest

from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload

ENGINE = replace(PRESETS["7b"], pull_tokens_per_s=100_000.0)
APART = Experiment(
    requests_per_s=2.0,
    workload=Workload(name="tool_agent", requests=200),
    engine=ENGINE,
    instances=4,
    prefillers=2,
    warmup=0,
    sessions=False,
    sample_s=None,
)


def test_every_request_of_a_split_run_ends_with_both_members_known() -> None:
    outcome = run_experiment(APART)

    assert len(outcome.records) == 200
    assert all(each.finished_s is not None for each in outcome.records)
    decoding = {each.endpoint for each in outcome.records}
    assert decoding <= {"10.0.0.0:8000", "10.0.0.1:8000"}
    rules = outcome.summary.rules
    assert rules["short"] > 0
    assert sum(number for rule, number in rules.items() if rule.startswith("remote")) > 0


def test_kv_moves_at_the_bandwidth_between_prefill_and_first_token() -> None:
    slow = replace(ENGINE, pull_tokens_per_s=1000.0)
    outcome = run_experiment(replace(APART, engine=slow, requests_per_s=0.2, prefill_min_tokens=1))

    moved = [each for each in outcome.records if each.rule is not None and each.rule.startswith("remote")]
    assert moved
    for each in moved:
        assert each.first_token_s is not None
        assert each.prefilled_s is not None
        assert each.first_token_s - each.prefilled_s >= each.arrival.work.prompt_tokens / 1000.0


def test_prompts_below_the_threshold_are_prefilled_by_decode_members() -> None:
    outcome = run_experiment(replace(APART, prefill_min_tokens=10**6))

    assert outcome.summary.rules.keys() == {"short"}


def test_equal_split_experiments_give_equal_records() -> None:
    first, second = (run_experiment(APART).summary for _ in range(2))

    assert repr(first) == repr(second)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": PRESETS["pd"]}, "decodes"),
        ({"routers": 2}, "one router"),
        ({"decoders": 1}, "one router"),
        ({"policy": "limit"}, "equal engines"),
    ],
)
def test_split_with_settings_that_it_does_not_model_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_experiment(replace(APART, **change))  # type: ignore[arg-type]
