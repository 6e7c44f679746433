"""Tests of static prefill/decode splits: calculated times, waits for memory, and invariants of a busy run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from clusters import (
    SEVEN_B,
    assert_books_empty,
    assert_each_ended_once,
    busy_config,
    busy_requests,
    config,
    one_block_prompts,
    small_pool,
)
from dualmap_sim.arrivals import Arrival
from dualmap_sim.cluster import Cluster, Record
from dualmap_sim.decoders import split
from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.workloads.catalog import Workload
from engines import ROUND

PULLING = replace(ROUND, pull_tokens_per_s=100.0)


def run_split(
    asked: Sequence[Arrival], *, engine: EngineConfig = PULLING, members: int = 1, decoders: int = 1
) -> tuple[Record, ...]:
    prefiller, side = split(engine, decoders=decoders)
    return Cluster(replace(config(small_pool(members), engine=prefiller), decode_side=side)).run(asked)


def test_first_token_follows_prefill_transfer_and_last_token() -> None:
    (record,) = run_split(one_block_prompts(0.0))
    assert record.prefilled_s == 1.5
    # The transfer of 100 tokens takes 1 s, and a step with the prompt's last token 0.51 s.
    assert record.first_token_s == pytest.approx(1.5 + 1.0 + 0.51)
    assert record.finished_s == pytest.approx(3.01 + 0.25)


def test_prefill_engine_starts_next_prompt_while_another_decodes() -> None:
    first, second = run_split(one_block_prompts(0.0, 0.0))
    assert (first.prefilled_s, second.prefilled_s) == (1.5, 3.0)
    assert first.finished_s == pytest.approx(3.26)


def test_request_waits_for_memory_of_the_decode_engine() -> None:
    small = replace(PULLING, kv_memory_tokens=150)
    first, second = run_split(one_block_prompts(0.0, 0.0), engine=small, members=2)
    assert (first.prefilled_s, second.prefilled_s) == (1.5, 1.5)
    assert first.finished_s is not None
    assert second.first_token_s == pytest.approx(first.finished_s + 0.51)


def test_transferred_requests_go_to_the_engine_with_fewest_tokens() -> None:
    records = run_split(one_block_prompts(0.0, 0.0), members=2, decoders=2)
    assert [record.first_token_s for record in records] == [pytest.approx(3.01), pytest.approx(3.01)]


def test_next_turn_of_closed_loop_follows_the_end_of_the_decode() -> None:
    first, second = one_block_prompts(0.0, 0.0)
    follower = replace(second, follows=first.request_id, pause_s=1.0)
    answered, next_turn = run_split((first, follower))
    assert answered.finished_s is not None
    assert next_turn.arrival.at_s == answered.finished_s + 1.0


def test_busy_split_ends_every_request_once() -> None:
    prefiller, side = split(replace(SEVEN_B, pull_tokens_per_s=100_000.0), decoders=4)
    cluster = Cluster(replace(busy_config(1, members=4), engine=prefiller, decode_side=side))
    asked = busy_requests()
    records = cluster.run(asked)
    assert_each_ended_once(asked, records)
    assert_books_empty(cluster)
    served = [record for record in records if record.first_token_s is not None]
    assert all(record.prefilled_s is not None for record in served)
    assert all(record.prefilled_s < record.first_token_s for record in served)  # type: ignore[operator]


def test_experiment_with_decoders_sends_prompts_to_other_instances() -> None:
    experiment = Experiment(
        workload=Workload(requests=60),
        engine=replace(PRESETS["7b"], pull_tokens_per_s=100_000.0),
        instances=4,
        decoders=3,
        requests_per_s=1.0,
        warmup=0,
    )
    outcome = run_experiment(experiment)
    assert {record.endpoint for record in outcome.records} == {"10.0.0.0:8000"}
    assert outcome.summary.refused == 0


def test_experiment_with_decoders_rejects_bounds() -> None:
    with pytest.raises(ValueError, match="requires equal engines"):
        run_experiment(
            Experiment(workload=Workload(requests=20), decoders=4, policy="limit", requests_per_s=1, warmup=0)
        )


@pytest.mark.parametrize("engine", [PRESETS["pd"], PRESETS["7b"]])
def test_engine_that_cannot_decode_or_pull_cannot_be_split(engine: EngineConfig) -> None:
    with pytest.raises(ValueError, match="requires an engine that decodes"):
        split(engine, decoders=4)
