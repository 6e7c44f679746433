"""Tests of the store that simulated engines share: what it says, and that routers and engines use it."""

from dataclasses import replace

import pytest

from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap_sim.experiment import Experiment, Outcome, run_experiment
from dualmap_sim.shared_store import SharedStore, StoreConfig
from dualmap_sim.workloads.catalog import Workload


def store() -> SharedStore:
    return SharedStore(block_tokens=512, min_tokens=1024)


def test_store_holds_the_beginning_that_it_has_without_a_gap() -> None:
    shared = store()
    shared.put("h1", (1, 2))
    shared.put("h2", (4,))

    assert shared.tokens((1, 2, 3, 4)) == 1024
    assert shared.match((1, 2, 3, 4), 2048) == StoreMatch(1024, (("h1", 1024),))


def test_host_that_stored_a_block_first_holds_it() -> None:
    shared = store()
    shared.put("h1", (1,))
    shared.put("h2", (1, 2))

    assert shared.match((1, 2), 1100) == StoreMatch(1024, (("h1", 512),))


def test_short_and_unknown_prompts_have_no_match() -> None:
    shared = store()
    shared.put("h1", (1,))

    assert shared.match((1,), 1023) == NO_MATCH
    assert shared.match((2, 3), 1024) == NO_MATCH


def run(policy: str, tokens_per_s: float | None, *, routers: int = 1) -> Outcome:
    experiment = Experiment(
        requests_per_s=4.0,
        workload=Workload(name="tool_agent", requests=600),
        policy=policy,
        warmup=100,
        sessions=False,
        routers=routers,
    )
    if tokens_per_s is not None:
        experiment = replace(experiment, store=StoreConfig(tokens_per_s=tokens_per_s))
    return run_experiment(experiment)


@pytest.mark.parametrize("policy", ["dualmap", "round_robin"])
def test_fast_store_fetches_and_shortens_the_ttft(policy: str) -> None:
    without, shared = run(policy, None), run(policy, 500_000.0)

    assert not any(each.pulled_tokens for each in without.records)
    assert sum(each.pulled_tokens for each in shared.records) > 0
    assert shared.summary.ttft_p50_s < without.summary.ttft_p50_s


def test_llumnix_prefers_hosts_that_hold_the_prompt_so_it_fetches_less_than_round_robin() -> None:
    fetched = [sum(each.pulled_tokens for each in run(policy, 5e5).records) for policy in ("llumnix", "round_robin")]

    assert 0 < fetched[0] < fetched[1]


def test_run_with_a_store_is_repeatable() -> None:
    runs = [run("dualmap", 200_000.0) for _ in range(2)]

    assert runs[0].summary == runs[1].summary


def test_routers_that_ask_the_owner_tell_it_what_the_store_holds() -> None:
    alone, together = run("dualmap", 500_000.0), run("dualmap", 500_000.0, routers=3)

    fetched = [sum(each.pulled_tokens for each in outcome.records) for outcome in (alone, together)]
    assert abs(fetched[0] - fetched[1]) < 0.1 * fetched[0]
