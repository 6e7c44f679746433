"""What a policy may know when it chooses: read-only views of one request, its pair, and the whole pool.

A view is made for one decision at one moment. Looking at every member costs time in proportion to their number, so
each is looked at only when a policy asks for it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from xxhash import xxh3_64_intdigest

from dualmap.hotness import HotnessRule
from dualmap.pool import Spill


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One member as it stands towards one request.

    ``queue_s`` is T_q and ``compute_s`` T_c of paper eq. 7; the tokens are prompt tokens, ``matched_tokens`` those
    believed cached there.
    """

    id: str
    state: str
    endpoint: str
    matched_tokens: int
    pending_tokens: int
    in_flight: int
    active_kv_tokens: int
    tokens_per_second: float
    queue_s: float
    compute_s: float

    @property
    def ttft_s(self) -> float:
        """The predicted time from a pick now to the first token: T_q + T_c."""
        return self.queue_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Rule:
    """Which part of a policy decided: a stable name for programs, and what it means, to follow "because"."""

    name: str
    meaning: str


LONE = Rule("lone", "no other member may take it")
PAIR_WARM = Rule("pair-warm", "of its pair it holds more of the prompt, and its predicted TTFT is within the limit")
PAIR_EQUAL = Rule("pair-equal", "both of its pair hold as much of the prompt, and it has no more prefill pending")
HOST_WARM = Rule("host-warm", "its session's last turn went there, it holds more of the prompt than either of its pair")


class Situation:
    """A request and the members it could go to.

    ``pair`` holds the one or two candidates in ring order, ``host`` the member that holds the KV of the request's
    session where that is known and not one of them; ``waited_s`` is how long the request has waited already,
    which counts towards its TTFT; ``sequence`` numbers the pool's requests from 0. ``everyone`` holds every member that
    takes new keys, by id; it is never empty, and looking at a member of it computes that candidate.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_tokens: int,
        waited_s: float,
        sequence: int,
        slo_ttft_s: float,
        spill: Spill,
        pair: tuple[Candidate, ...],
        everyone: Sequence[Candidate],
        host: Candidate | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.waited_s = waited_s
        self.sequence = sequence
        self.slo_ttft_s = slo_ttft_s
        self.spill = spill
        self.pair = pair
        self.everyone = everyone
        self.host = host

    def least(
        self, candidates: Iterable[Candidate], cost: Callable[[Candidate], float | tuple[float, ...]]
    ) -> Candidate:
        """Return the candidate of least cost; ties go by a stable hash of the request, never by the list's order."""
        costed = [(cost(candidate), candidate) for candidate in candidates]
        least = min(value for value, _ in costed)
        equal = [candidate for value, candidate in costed if value == least]
        if len(equal) == 1:
            return equal[0]
        return max(equal, key=lambda each: xxh3_64_intdigest(f"{self.request_id}\x00{each.id}".encode()))

    def warmest(self) -> tuple[Candidate, Rule]:
        """Return the candidate of the pair with more reusable prefix, and the rule that says so.

        With equal reuse it is the one with less pending prefill (paper section 3.2), then with fewer in flight. The
        session's host comes before them only if it holds more than either.
        """
        most = max(candidate.matched_tokens for candidate in self.pair)
        if self.host is not None and self.host.matched_tokens > most:
            return self.host, HOST_WARM
        warm = [candidate for candidate in self.pair if candidate.matched_tokens == most]
        rule = LONE if len(self.pair) == 1 else PAIR_WARM if len(warm) < len(self.pair) else PAIR_EQUAL
        return self.least(warm, lambda each: (each.pending_tokens, each.in_flight)), rule


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: the chosen candidate and the rule that fired."""

    candidate: Candidate
    rule: Rule


class Policy(Protocol):
    """How a request's instance is chosen. Policies hold no state: all they may know is in the situation.

    ``hotness`` says when hot prefixes get longer keys; None keeps every key at its initial length.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]
    hotness: ClassVar[HotnessRule | None]

    def choose(self, situation: Situation) -> Choice:
        """Return one candidate of the situation's pair or of everyone."""
