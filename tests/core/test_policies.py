"""Each policy's rule on hand-made situations; what they do to whole workloads is for the simulator to show."""

import pytest

from dualmap.hotness import HotnessRule
from dualmap.policies import POLICIES
from dualmap.pool import Spill
from dualmap.situation import Candidate, Situation, Weights

SLO_S = 5.0


def candidate(
    id: str, *, matched: int = 0, pending: int = 0, queue_s: float = 0.0, compute_s: float = 0.1, kv: int = 0
) -> Candidate:
    return Candidate(
        id=id,
        state="Active",
        endpoint=f"{id}:1",
        matched_tokens=matched,
        pending_tokens=pending,
        in_flight=0,
        active_kv_tokens=kv,
        tokens_per_second=1000.0,
        queue_s=queue_s,
        compute_s=compute_s,
    )


class Listed(list[Candidate]):
    """Everyone as written down; its columns are what the costs are documented to be."""

    def costs_s(self, weights: Weights) -> list[float]:
        return [
            each.queue_s
            + weights.compute * each.compute_s
            + weights.active_kv * each.active_kv_tokens / each.tokens_per_second
            for each in self
        ]

    def pending_tokens(self) -> list[int]:
        return [each.pending_tokens for each in self]

    def in_flight(self) -> list[int]:
        return [each.in_flight for each in self]


def decide(
    policy: str,
    *candidates: Candidate,
    waited_s: float = 0.0,
    sequence: int = 0,
    spill: Spill | None = None,
    id: str = "r",
) -> tuple[str, str]:
    """The first two candidates are the pair."""
    situation = Situation(
        request_id=id,
        prompt_tokens=1000,
        waited_s=waited_s,
        sequence=sequence,
        slo_ttft_s=SLO_S,
        spill=spill or Spill(),
        pair=candidates[:2],
        everyone=Listed(sorted(candidates, key=lambda each: each.id)),
    )
    choice = POLICIES[policy].choose(situation)
    return choice.candidate.id, choice.rule.name


@pytest.mark.parametrize("policy", ["dualmap", "dualmap_paper"])
def test_the_warmer_of_the_pair_while_it_is_fast_enough(policy: str) -> None:
    warm, cold = candidate("b", matched=800, queue_s=2.0, pending=2000), candidate("a")
    assert decide(policy, warm, cold) == ("b", "pair-warm")
    assert decide(policy, cold, warm) == ("b", "pair-warm")


@pytest.mark.parametrize("policy", ["dualmap", "dualmap_paper"])
def test_equal_reuse_goes_to_the_less_loaded(policy: str) -> None:
    busy, idle = candidate("a", matched=500, pending=300), candidate("b", matched=500)
    assert decide(policy, busy, idle) == ("b", "pair-equal")


def test_the_paper_takes_the_less_loaded_of_the_pair_beyond_the_slo() -> None:
    warm, other, idle = (
        candidate("a", matched=800, queue_s=5.0, pending=5000),
        candidate("b", pending=10),
        candidate("c"),
    )
    assert decide("dualmap_paper", warm, other, idle) == ("b", "pair-less-loaded")
    just_within = warm._replace(queue_s=4.9)
    assert decide("dualmap_paper", just_within, other, idle) == ("a", "pair-warm")


def test_dualmap_spills_by_marginal_cost_at_half_the_slo() -> None:
    warm = candidate("a", matched=800, queue_s=2.4, compute_s=0.1)
    other, idle = candidate("b", queue_s=3.0, compute_s=1.0), candidate("c", compute_s=0.3)
    assert decide("dualmap", warm, other, idle) == ("a", "pair-warm")
    assert decide("dualmap", warm._replace(queue_s=2.5), other, idle) == ("c", "spill")
    # The weight of T_c keeps it home while the detour costs more work than the queue costs time: 2.6 + 3*0.1 < 3*1.0.
    dear = idle._replace(compute_s=1.0)
    assert decide("dualmap", warm._replace(queue_s=2.6), other, dear) == ("a", "pair-marginal")
    # Active KV counts: 20 000 tokens at 1000/s weigh 0.2 * 20 s.
    assert decide("dualmap", warm._replace(queue_s=2.6), other, idle._replace(active_kv_tokens=20_000)) == (
        "a",
        "pair-marginal",
    )


def test_time_already_waited_counts() -> None:
    warm, other, idle = candidate("a", matched=800, queue_s=2.0), candidate("b"), candidate("c")
    assert decide("dualmap", warm, other, idle, waited_s=0.3)[0] == "a"
    assert decide("dualmap", warm, other, idle, waited_s=0.5)[0] != "a"


def test_the_spill_is_the_pools_to_set() -> None:
    warm, other, idle = candidate("a", matched=800, queue_s=1.0), candidate("b", queue_s=2.0), candidate("c")
    assert decide("dualmap", warm, other, idle, spill=Spill(slo_fraction=0.2))[1] == "spill"


def test_min_ttft_and_least_loaded_look_at_everyone() -> None:
    pair = candidate("a", matched=900, queue_s=1.0, pending=5), candidate("b", queue_s=1.0, pending=900)
    third = candidate("c", queue_s=0.2, compute_s=0.7, pending=6)
    assert decide("min_ttft", *pair, third) == ("c", "min-ttft")
    assert decide("least_loaded", *pair, third) == ("a", "least-loaded")


def test_cache_affinity_never_leaves_ring_1() -> None:
    assert decide("cache_affinity", candidate("a", queue_s=99.0), candidate("b"))[0] == "a"


def test_round_robin_takes_turns() -> None:
    candidates = [candidate(id) for id in "cab"]
    assert [decide("round_robin", *candidates, sequence=n)[0] for n in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("round_robin", "cache_affinity")])
def test_ties_spread_over_requests_and_do_not_follow_the_lists_order(policy: str) -> None:
    one, other = candidate("a"), candidate("b")
    picks = [decide(policy, one, other, id=f"r{n}")[0] for n in range(100)]
    assert picks == [decide(policy, other, one, id=f"r{n}")[0] for n in range(100)]
    assert 30 < picks.count("a") < 70


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_member_gets_everything(policy: str) -> None:
    assert decide(policy, candidate("a", queue_s=100.0))[0] == "a"


def test_the_hotness_rules_are_those_documented() -> None:
    # Paper section 3.2: hot above 2/n, merged below 1/n; `dualmap` halves both (docs/adr/0003).
    rules = {name: policy.hotness for name, policy in POLICIES.items()}
    assert rules["dualmap_paper"] == HotnessRule(split=2.0, merge=1.0)
    assert rules["dualmap"] == HotnessRule(split=1.0, merge=0.5)
    assert all(rule is None for name, rule in rules.items() if not name.startswith("dualmap"))


def test_load_means_pending_prefill_not_requests() -> None:
    few_long = candidate("a", pending=900, queue_s=9.0)._replace(in_flight=1)
    many_short = candidate("b", pending=10, queue_s=9.0)._replace(in_flight=50)
    assert decide("dualmap_paper", few_long, many_short) == ("b", "pair-less-loaded")
    assert decide("least_loaded", few_long, many_short)[0] == "b"


def test_min_ttft_breaks_ties_by_requests_in_flight() -> None:
    busy, idle = candidate("a")._replace(in_flight=9), candidate("b")
    assert {decide("min_ttft", busy, idle, id=f"r{n}")[0] for n in range(20)} == {"b"}


def test_every_policy_names_its_source() -> None:
    for name, policy in POLICIES.items():
        assert (policy.name, bool(policy.source), bool(policy.summary)) == (name, True, True)
