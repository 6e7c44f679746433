"""Tests of Zipf bursts: the requested shares, and cold prefixes that become hot one after the other."""

import hashlib
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from dualmap.keys.hotness import HotnessTree
from dualmap_sim.arrivals import arrivals
from dualmap_sim.workloads.statistics import compare
from dualmap_sim.workloads.trace import Trace
from dualmap_sim.workloads.zipf_bursts import ASKED, BURST_EVERY_S, BURST_S, zipf_bursts_workload

TOLERANCES = {
    "requests behind the hottest prefix": 0.01,
    "requests behind the second prefix": 0.01,
    "requests behind one prefix in a burst": 0.08,
    "coefficient of variation of arrivals": 0.05,
}


@cache
def workload(seed: int) -> Trace:
    return zipf_bursts_workload(4000, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_zipf_bursts_match_the_requested_statistics(seed):
    facts = {fact.name: fact for fact in compare(workload(seed), ASKED)}

    assert set(TOLERANCES) <= set(facts)
    for name, tolerance in TOLERANCES.items():
        assert facts[name].produced == pytest.approx(facts[name].asked, abs=tolerance), name


def test_workload_is_fixed_by_its_seed_on_any_machine():
    assert workload(0) != workload(1)
    digest = hashlib.sha256(repr(zipf_bursts_workload(200).requests).encode()).hexdigest()
    assert digest == "c46ccb6f06a37c487a241fe76b000e4a1ac35dc3ad72508641688f834b41dc90"


def test_shorter_workload_equals_the_start_of_a_longer_workload():
    assert zipf_bursts_workload(200).requests == workload(0).requests[:200]


def test_each_burst_uses_a_new_uncached_prefix():
    bursts: dict[int, Counter[int]] = {}
    calm: Counter[int] = Counter()
    for request in workload(0).requests:
        period, into_s = divmod(request.arrival_s, BURST_EVERY_S)
        if into_s >= BURST_EVERY_S - BURST_S:
            bursts.setdefault(int(period), Counter())[request.blocks[0]] += 1
        else:
            calm[request.blocks[0]] += 1
    hottest = [counts.most_common(1)[0][0] for counts in bursts.values() if counts.total() > 100]

    assert len(hottest) >= 9
    assert len(set(hottest)) == len(hottest)
    assert all(calm[prefix] < 0.02 * calm.total() for prefix in hottest)


def test_prompt_lengths_fit_their_blocks_and_arrivals_are_ordered():
    assert all(len(one.blocks) == -(-one.input_tokens // 512) for one in workload(0).requests)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(workload(0).requests))


def test_key_is_longer_during_bursts_and_shorter_afterwards():
    tree = HotnessTree(initial_blocks=2, max_blocks=32, window_s=60.0)
    halves: dict[bool, list[int]] = {False: [], True: []}
    for one in arrivals(workload(0), router_block_tokens=512, engine_block_tokens=512):
        blocks = tree.key_blocks(one.at_s, one.chain.hashes, split_share=2 / 8, merge_share=1 / 8)
        halves[one.at_s % BURST_EVERY_S >= BURST_EVERY_S - BURST_S].append(blocks)
    longer = {hot: sum(blocks > 2 for blocks in lengths) / len(lengths) for hot, lengths in halves.items()}

    assert longer[True] > 0.2, "of 0.45 at most, once the burst is noticed"
    assert longer[False] < 0.05
