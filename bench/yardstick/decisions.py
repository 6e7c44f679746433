"""Compares decisions: what this project's policy ``dynamo`` chooses where Dynamo's router chose, on the same data.

The history is Dynamo's: each request is where Dynamo sent it. So a difference never leads to further differences, and
only the rules differ. Dynamo's log has the cached blocks and the prefills of each worker; the report has the requests
in flight.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final

from bench.yardstick.dynamo_replay import Reported
from bench.yardstick.setting import BLOCK_TOKENS

from dualmap.fleet.distinct_blocks import DistinctBlocks
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Candidate, Situation, Weights
from dualmap.pools.pool import Spill
from dualmap.prompts.blocks import BlockChain

_CLOSE: Final = 0.01
"""The log rounds costs to a thousandth of a block. Costs closer than this are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The workers of one decision as a policy sees them: a list with one number for each worker."""

    number: int
    prompt_tokens: int
    pending: Sequence[int]
    placed: Sequence[int]
    distinct: Sequence[int]
    matched: Sequence[int]

    def __len__(self) -> int:
        return len(self.placed)

    def __getitem__(self, position: int) -> Candidate:
        return Candidate(
            id=str(position),
            state="Active",
            endpoint=str(position),
            matched_tokens=self.matched[position],
            pending_tokens=self.pending[position],
            in_flight=0,
            active_kv_tokens=self.placed[position],
            tokens_per_second=1.0,
            queue_s=float(self.pending[position]),
            compute_s=float(self.prompt_tokens - self.matched[position]),
        )

    def __iter__(self) -> Iterator[Candidate]:
        return (self[position] for position in range(len(self)))

    def costs_s(self, weights: Weights) -> list[float]:
        return [weights.cost_s(candidate) for candidate in self]

    def pending_tokens(self) -> list[int]:
        return list(self.pending)

    def in_flight(self) -> list[int]:
        return [0] * len(self)

    def requests(self) -> list[int]:
        return [0] * len(self)

    def placed_tokens(self) -> list[int]:
        return list(self.placed)

    def distinct_tokens(self) -> list[int]:
        return list(self.distinct)

    def matched_tokens(self) -> list[int]:
        return list(self.matched)

    def held_tokens(self) -> list[int]:
        return self.matched_tokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a rule decides like Dynamo's router.

    ``same`` is the share of decisions whose worker has the lowest cost by Dynamo's formula. ``excess_blocks`` is the
    mean cost, by Dynamo's formula, of the chosen worker above the lowest cost.
    """

    same: float
    excess_blocks: float


def agreements(reported: Sequence[Reported], chains: Sequence[BlockChain], *, skipped: int) -> Mapping[str, Agreement]:
    """Return the agreement of Dynamo's choices and of each rule, without the first ``skipped`` decisions."""
    decided = list(zip(reported, columns(reported, chains), strict=True))[skipped:]
    found = {"Dynamo's own choices": _agreement([(each, each.served.worker) for each, _ in decided])}
    for name, choose in _RULES.items():
        found[name] = _agreement([(each, choose(seen)) for each, seen in decided])
    return found


def columns(reported: Sequence[Reported], chains: Sequence[BlockChain]) -> Iterator[Columns]:
    """Return the workers of each decision. ``reported`` is in order of arrival, with the terms of each decision."""
    workers = sorted(reported[0].terms)
    distinct = {worker: DistinctBlocks(()) for worker in workers}
    placed = dict.fromkeys(workers, 0)
    ends: list[tuple[float, int]] = []
    for number, (each, chain) in enumerate(zip(reported, chains, strict=True)):
        while ends and ends[0][0] <= each.served.arrival_s:
            ended = heappop(ends)[1]
            distinct[reported[ended].served.worker].remove(chains[ended])
            placed[reported[ended].served.worker] -= chains[ended].tokens
        matched = [round(each.terms[worker].cached * BLOCK_TOKENS) for worker in workers]
        prefill = [round(each.terms[worker].prefill * BLOCK_TOKENS) for worker in workers]
        yield Columns(
            number=number,
            prompt_tokens=chain.tokens,
            # Dynamo's prefill term is the sum of the unfinished prefills and of the uncached part of the new prompt.
            pending=[total - (chain.tokens - cached) for total, cached in zip(prefill, matched, strict=True)],
            placed=[placed[worker] for worker in workers],
            distinct=[distinct[worker].tokens_with(chain) for worker in workers],
            matched=matched,
        )
        distinct[each.served.worker].add(chain)
        placed[each.served.worker] += chain.tokens
        heappush(ends, (each.finished_s, number))


def _policy(seen: Columns) -> int:
    situation = Situation(
        request_id=str(seen.number),
        prompt_tokens=seen.prompt_tokens,
        waited_s=0.0,
        sequence=seen.number,
        slo_ttft_s=1.0,
        spill=Spill(),
        pair=(seen[0],),
        everyone=seen,
        ring_walk=lambda: range(len(seen)),
        room_tokens=0,
    )
    return int(POLICIES["dynamo"].choose(situation).candidate.id)


def _repeated_blocks(seen: Columns) -> int:
    return min(range(len(seen)), key=lambda each: seen.pending[each] - seen.matched[each] + seen.placed[each])


def _no_unfinished_prefills(seen: Columns) -> int:
    return min(range(len(seen)), key=lambda each: seen.placed[each] - seen.matched[each])


_RULES: Final[Mapping[str, Callable[[Columns], int]]] = MappingProxyType(
    {
        "the policy `dynamo`": _policy,
        "with shared blocks counted for each request": _repeated_blocks,
        "and without unfinished prefills": _no_unfinished_prefills,
    }
)


def _agreement(choices: Sequence[tuple[Reported, int]]) -> Agreement:
    excesses = []
    for each, worker in choices:
        costs = {worker: terms.cost for worker, terms in each.terms.items()}
        excesses.append(costs[worker] - min(costs.values()))
    return Agreement(
        same=sum(excess <= _CLOSE for excess in excesses) / len(excesses),
        excess_blocks=sum(excesses) / len(excesses),
    )
