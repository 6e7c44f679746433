"""The input of a policy: read-only views of one request, its pair, and all members of the pool.

A view is valid for one decision. The cost of reading every member grows with the number of members, so candidates are
created on demand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from dualmap.keys.hotness import HotnessRule
from dualmap.pools.pool import Spill


class Candidate(NamedTuple):
    """One member that a request may go to.

    ``queue_s`` is T_q and ``compute_s`` is T_c of the paper's eq. 7. Token counts are prompt tokens; ``matched_tokens``
    are assumed to be cached at the member. If ``reported``, the KV events of the member's engine say so. The class is a
    named tuple because every decision creates two or three candidates. A named tuple is immutable and takes half the
    time of a frozen dataclass. ``fetch_tokens`` are the prompt tokens behind them that the member would fetch from the
    pool's KV store; ``compute_s`` includes the time to fetch them.
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
    reported: bool = False
    fetch_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """The predicted time from a dispatch now to the first token: T_q + T_c (paper eq. 7)."""
        return self.queue_s + self.compute_s


class Weights(NamedTuple):
    """The weights of a member's cost in seconds: ``T_q + compute * T_c + active_kv * active KV / speed``."""

    compute: float
    active_kv: float = 0.0

    def cost_s(self, candidate: Candidate) -> float:
        """Return a member's cost."""
        active_kv_s = candidate.active_kv_tokens / candidate.tokens_per_second
        return candidate.queue_s + self.compute * candidate.compute_s + self.active_kv * active_kv_s


class Everyone(Protocol):
    """Every member that new keys may map to, by id: as candidates (created on demand) or as columns.

    A column is a list with one number for each member, in the same order. A column takes far less time than the
    candidates.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Candidate: ...

    def __iter__(self) -> Iterator[Candidate]: ...

    def costs_s(self, weights: Weights) -> list[float]:
        """Return each member's cost by ``weights``."""

    def pending_tokens(self) -> list[int]:
        """Return each member's pending prefill tokens."""

    def in_flight(self) -> list[int]:
        """Return each member's number of requests in flight."""

    def requests(self) -> list[int]:
        """Return each member's number of requests in flight and queued."""

    def placed_tokens(self) -> list[int]:
        """Return each member's KV tokens of requests in flight, plus the tokens that its queued requests will add."""

    def distinct_tokens(self) -> list[int]:
        """Return each member's ``placed_tokens`` and the prompt's; shared blocks of requests in flight count once."""

    def matched_tokens(self) -> list[int]:
        """Return the number of prompt tokens that each member is assumed to cache."""

    def held_tokens(self) -> list[int]:
        """Return ``matched_tokens``, or what the pool's KV store says that the member's host holds, if that is more."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a policy that decided: a stable name for programs, and a meaning that completes "because"."""

    name: str
    meaning: str


LONE = Rule("lone", "it is the only candidate")
PAIR_WARM = Rule(
    "pair-warm",
    "it has more of the prompt cached than the other of the pair, and its predicted TTFT is within the limit",
)
PAIR_EQUAL = Rule(
    "pair-equal", "both of the pair have the same part of the prompt cached, and it has less or equal load"
)
HOST_WARM = Rule(
    "host-warm", "it served the session's last turn and has more of the prompt cached than either of the pair"
)

LEAVING_WARM = Rule(
    "leaving-warm", "it has more of the prompt cached than any other choice, and will answer before it leaves"
)


class Situation:
    """A request and its candidates.

    ``pair`` contains one or two candidates in ring order. ``host`` is the member with the KV of the request's session,
    if it is known and may get the request; ``last_member`` is its id in any case. ``may_move`` is true if the session
    has not moved within the cooldown. ``waited_s`` is the time that the request has waited, which counts towards its
    TTFT. ``sequence`` numbers the pool's requests from 0. ``room_tokens`` is the KV capacity of a member in tokens.
    ``everyone`` contains every member that new keys may map to, by id, and is never empty. ``ring_walk`` returns the
    members' positions in ``everyone``, in the order of ring 1 from the request's key.
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
        everyone: Everyone,
        ring_walk: Callable[[], Iterable[int]],
        room_tokens: int,
        host: Candidate | None = None,
        last_member: str = "",
        may_move: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.waited_s = waited_s
        self.sequence = sequence
        self.slo_ttft_s = slo_ttft_s
        self.spill = spill
        self.pair = pair
        self.everyone = everyone
        self.ring_walk = ring_walk
        self.room_tokens = room_tokens
        self.host = host
        self.last_member = last_member
        self.may_move = may_move

    def least(
        self, candidates: Iterable[Candidate], cost: Callable[[Candidate], float | tuple[float, ...]]
    ) -> Candidate:
        """Return the candidate with the lowest cost. A stable hash of the request id breaks ties."""
        costed = [(cost(candidate), candidate) for candidate in candidates]
        least = min(value for value, _ in costed)
        equal = [candidate for value, candidate in costed if value == least]
        if len(equal) == 1:
            return equal[0]
        equal.sort(key=lambda each: each.id)
        return equal[self.lot(len(equal))]

    def cheapest(self, column: Sequence[float]) -> Candidate:
        """Return the member with the lowest number in a column of ``everyone``.

        Ties are broken by the fewest requests in flight, then by a stable hash of the request id.
        """
        everyone, least = self.everyone, min(column)
        first = column.index(least)
        if least not in column[first + 1 :]:
            return everyone[first]
        in_flight = everyone.in_flight()
        equal = [position for position, cost in enumerate(column) if cost == least]
        fewest = min([in_flight[position] for position in equal])
        equal = [position for position in equal if in_flight[position] == fewest]
        return everyone[equal[self.lot(len(equal))]]

    def less_loaded(self) -> Candidate:
        """Return the candidate of the pair with less pending prefill (paper section 3.2), then fewer in flight."""
        return self.least(self.pair, lambda each: (each.pending_tokens, each.in_flight))

    def warmest(self) -> tuple[Candidate, Rule]:
        """Return the candidate of the pair with more cached tokens (the less loaded if equal), and the rule.

        If the session's host has more cached tokens than both candidates, the result is the host.
        """
        first, last = self.pair[0], self.pair[-1]
        warm = first if first.matched_tokens >= last.matched_tokens else last
        if self.host is not None and self.host.matched_tokens > warm.matched_tokens:
            return self.host, HOST_WARM
        if first is last:
            return first, LONE
        if first.matched_tokens == last.matched_tokens:
            return self.less_loaded(), PAIR_EQUAL
        return warm, PAIR_WARM

    def lot(self, among: int, draw: int = 0) -> int:
        """Return a pseudo-random integer from 0 to ``among`` - 1, computed from the request id and ``draw``."""
        return xxh3_64_intdigest(self.request_id.encode(), draw) % among


class Choice(NamedTuple):
    """A policy's result: the chosen candidate and the rule that decided."""

    candidate: Candidate
    rule: Rule


class Policy(Protocol):
    """A policy chooses a request's member. Policies have no state: the situation is their only input.

    ``hotness`` contains the thresholds for longer keys of hot prefixes; with None, every key has its initial length. If
    ``rebalances`` is true and the pool enables rebalancing, queued requests move within their pair. Only DualMap's
    policies rebalance, because a move within the pair would undo the choices of other policies. If ``defers`` is true,
    queued requests that can still meet the SLO overtake requests that will miss it. For other policies, the pool's
    ``queue.order: Deadline`` has this effect.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]
    hotness: ClassVar[HotnessRule | None]
    rebalances: ClassVar[bool]
    defers: ClassVar[bool]

    def choose(self, situation: Situation) -> Choice:
        """Return one candidate of ``situation.pair`` or ``situation.everyone``."""
