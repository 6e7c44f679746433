"""Situations for tests of policies: candidates in ring order, with the documented columns."""

from collections.abc import Sequence

from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Candidate, Situation, Weights
from dualmap.pools.pool import Spill

SLO_S = 5.0
PROMPT_TOKENS = 1000


def candidate(
    id: str,
    *,
    matched: int = 0,
    pending: int = 0,
    requests: int = 0,
    queue_s: float = 0.0,
    compute_s: float = 0.1,
    kv: int = 0,
) -> Candidate:
    return Candidate(
        id=id,
        state="Active",
        endpoint=f"{id}:1",
        matched_tokens=matched,
        pending_tokens=pending,
        in_flight=requests,
        active_kv_tokens=kv,
        tokens_per_second=1000.0,
        queue_s=queue_s,
        compute_s=compute_s,
    )


class Listed(list[Candidate]):
    """The candidates as a list, without queued requests."""

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

    def requests(self) -> list[int]:
        return [each.in_flight for each in self]

    def placed_tokens(self) -> list[int]:
        return [each.active_kv_tokens for each in self]

    def distinct_tokens(self) -> list[int]:
        return [each.active_kv_tokens for each in self]

    def matched_tokens(self) -> list[int]:
        return [each.matched_tokens for each in self]

    def held_tokens(self) -> list[int]:
        return self.matched_tokens()


def situation_of(
    candidates: Sequence[Candidate],
    *,
    prompt: int = PROMPT_TOKENS,
    waited_s: float = 0.0,
    sequence: int = 0,
    spill: Spill | None = None,
    room: int = 1_000_000,
    host: Candidate | None = None,
    may_move: bool = True,
    id: str = "r",
) -> Situation:
    """The candidates are in the key's order on ring 1; the first two candidates are the pair."""
    everyone = Listed(sorted(candidates, key=lambda each: each.id))
    return Situation(
        request_id=id,
        prompt_tokens=prompt,
        waited_s=waited_s,
        sequence=sequence,
        slo_ttft_s=SLO_S,
        spill=spill or Spill(),
        pair=tuple(candidates[:2]),
        everyone=everyone,
        ring_walk=lambda: [everyone.index(each) for each in candidates],
        room_tokens=room,
        host=host,
        may_move=may_move,
    )


def decide(
    policy: str,
    *candidates: Candidate,
    prompt: int = PROMPT_TOKENS,
    waited_s: float = 0.0,
    sequence: int = 0,
    spill: Spill | None = None,
    room: int = 1_000_000,
    host: Candidate | None = None,
    may_move: bool = True,
    id: str = "r",
) -> tuple[str, str]:
    """Return the chosen member and the applied rule; see ``situation_of``."""
    situation = situation_of(
        candidates,
        prompt=prompt,
        waited_s=waited_s,
        sequence=sequence,
        spill=spill,
        room=room,
        host=host,
        may_move=may_move,
        id=id,
    )
    choice = POLICIES[policy].choose(situation)
    return choice.candidate.id, choice.rule.name
