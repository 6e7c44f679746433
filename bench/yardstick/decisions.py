"""Compares decisions: what this project's policy ``dynamo`` chooses where Dynamo's router chose, on the same data.

The history is Dynamo's: each request is where Dynamo sent it. So a difference never leads to further differences, and
only the rules differ. Dynamo's log has the cached blocks and the prefills of each worker; the report has the requests
in flight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.yardstick.dynamo_replay import Reported
from bench.yardstick.setting import BLOCK_TOKENS

from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Candidate, Situation, Weights
from dualmap.pools.pool import Spill

_CLOSE: Final = 0.01
"""The log rounds costs to a thousandth of a block. Costs closer than this are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The workers of one decision as a policy sees them: a list with one number for each worker."""

    prompt_tokens: int
    pending: Sequence[int]
    placed: Sequence[int]
    matched: Sequence[int]
    requests_in_flight: Sequence[int]

    def __len__(self) -> int:
        return len(self.placed)

    def __getitem__(self, position: int) -> Candidate:
        return Candidate(
            id=str(position),
            state="Ready",
            endpoint=str(position),
            matched_tokens=self.matched[position],
            pending_tokens=self.pending[position],
            in_flight=self.requests_in_flight[position],
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
        return list(self.requests_in_flight)

    def requests(self) -> list[int]:
        return list(self.requests_in_flight)

    def placed_tokens(self) -> list[int]:
        return list(self.placed)

    def matched_tokens(self) -> list[int]:
        return list(self.matched)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a rule decides like Dynamo's router.

    ``same`` is the share of decisions with an equal cost by Dynamo's formula. ``excess_blocks`` is the mean cost, by
    Dynamo's formula, of the rule's choice above the lowest cost.
    """

    decisions: int
    same: float
    excess_blocks: float


def agreements(reported: Sequence[Reported], *, skipped: int) -> dict[str, Agreement]:
    """Return the agreement of three rules with Dynamo's router, without the first ``skipped`` decisions.

    The rules are Dynamo's own formula, the policy ``dynamo``, and this policy without the unfinished prefills.
    """
    excesses: dict[str, list[float]] = {"Dynamo's router": [], "`dynamo`": [], "`dynamo` without pending prefills": []}
    for number, each in enumerate(reported):
        if number < skipped:
            continue
        columns = columns_of(each, _in_flight(reported, number))
        costs = {worker: terms.cost for worker, terms in each.terms.items()}
        blind = min(range(len(columns)), key=lambda worker, seen=columns: seen.placed[worker] - seen.matched[worker])
        chosen = (each.served.worker, _choice(each.served.number, columns), blind)
        for excess, worker in zip(excesses.values(), chosen, strict=True):
            excess.append(costs[worker] - min(costs.values()))
    return {
        name: Agreement(
            decisions=len(excess),
            same=sum(value <= _CLOSE for value in excess) / len(excess),
            excess_blocks=sum(excess) / len(excess),
        )
        for name, excess in excesses.items()
    }


def columns_of(reported: Reported, in_flight: Mapping[int, Sequence[int]]) -> Columns:
    """Return the workers of a decision; ``in_flight`` are the prompt lengths of each worker's requests in flight."""
    prompt, workers = reported.served.prompt_tokens, sorted(reported.terms)
    matched = [round(reported.terms[worker].cached * BLOCK_TOKENS) for worker in workers]
    prefill = [round(reported.terms[worker].prefill * BLOCK_TOKENS) for worker in workers]
    return Columns(
        prompt_tokens=prompt,
        # Dynamo's prefill term is the sum of the unfinished prefills and of the uncached part of the new prompt.
        pending=[total - (prompt - cached) for total, cached in zip(prefill, matched, strict=True)],
        placed=[sum(in_flight.get(worker, ())) for worker in workers],
        matched=matched,
        requests_in_flight=[len(in_flight.get(worker, ())) for worker in workers],
    )


def _in_flight(reported: Sequence[Reported], number: int) -> dict[int, list[int]]:
    now = reported[number].served.arrival_s
    lengths: dict[int, list[int]] = {}
    for each in reported[:number]:
        if each.finished_s > now:
            lengths.setdefault(each.served.worker, []).append(each.served.prompt_tokens)
    return lengths


def _choice(number: int, columns: Columns) -> int:
    """Return the worker that the policy ``dynamo`` chooses."""
    situation = Situation(
        request_id=str(number),
        prompt_tokens=columns.prompt_tokens,
        waited_s=0.0,
        sequence=number,
        slo_ttft_s=1.0,
        spill=Spill(),
        pair=(columns[0],),
        everyone=columns,
        ring_walk=lambda: range(len(columns)),
        room_tokens=0,
    )
    return int(POLICIES["dynamo"].choose(situation).candidate.id)
