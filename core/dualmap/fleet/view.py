"""Read-only views of a pool's members for one prompt at one time.

The creation of a Candidate takes microseconds, so a decision creates candidates only for its pair and its choice. For
all members of a ring, a view computes lists of plain numbers with one number per member. ``fleet`` creates views;
``situation`` passes them to policies.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final, NamedTuple

from dualmap.fleet.claims import CLAIM_S
from dualmap.fleet.fetches import StoreTier
from dualmap.fleet.load import MemberLoad
from dualmap.fleet.memory_waits import MemoryWaits
from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree
from dualmap.fleet.reported import ReportedMatches
from dualmap.policies.situation import Candidate, Weights
from dualmap.pools.pool import Member
from dualmap.prompts.blocks import BlockChain
from dualmap.queue.request_queue import MemberQueue


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """A member with its load and index in this router; ``endpoint`` and ``state`` are formatted only once."""

    member: Member
    endpoint: str
    state: str
    load: MemberLoad
    index: PrefixIndex


class Hint(NamedTuple):
    """Tokens of a prompt that a member computed at ``since_s`` or later, according to the store.

    Beside the engine's report, a hint counts only as long as a claim (``dualmap.fleet.claims``).
    """

    tokens: int = 0
    since_s: float = -inf


NO_HINT: Final = Hint()


class Roster:
    """The members of a ring, by id; the summaries are valid after ``Ledger.update``."""

    def __init__(self, instances: tuple[Instance, ...]) -> None:
        self.instances = instances
        self.positions = {each.index: position for position, each in enumerate(instances)}
        self.ids = {each.member.id: position for position, each in enumerate(instances)}
        self.summaries = [each.load.summary for each in instances]


class View:
    """The members of a pool for one prompt; valid until the next event.

    ``reported`` contains what members with KV events hold of the prompt, None if nothing is known. ``behind_s`` returns
    the seconds of queued prefills that the prompt's client overtakes; None if it overtakes none. ``stored`` is what the
    pool's KV store holds of the prompt; None if nothing. ``waits`` predicts the waits for memory; None if none counts.
    """

    def __init__(
        self,
        now: float,
        chain: BlockChain,
        instances: Mapping[str, Instance],
        tree: PrefixTree,
        *,
        stall_s: float,
        reported: ReportedMatches | None = None,
        behind_s: Callable[[MemberQueue], float] | None = None,
        stored: StoreTier | None = None,
        waits: MemoryWaits | None = None,
    ) -> None:
        self.now = now
        self.chain = chain
        self.tree = tree
        self.stall_s = stall_s
        self.behind_s = behind_s
        self.stored = stored
        self.waits = waits
        self.path = tree.path(chain.hashes)
        self.reported = reported
        self._instances = instances

    def candidate(self, member: str, hint: Hint = NO_HINT) -> Candidate:
        """Return a member as a candidate; the hint says what is known to be cached there."""
        return self.look(self._instances[member], hint)

    def recorded_tokens(self, member: str) -> int:
        """Return how many tokens of the prompt a member caches by the router's own record."""
        return self.chain.tokens_of(self._instances[member].index.matched_on(self.path))

    def look(self, instance: Instance, hint: Hint = NO_HINT) -> Candidate:
        """Return an instance as a candidate; the hint says what is known to be cached there."""
        chain, load = self.chain, instance.load.update(self.now, self.stall_s)
        speed, queue_s = instance.load.speed.current, load.queue_s(self.now)
        matched_tokens = chain.tokens_of(instance.index.matched_on(self.path))
        reported_tokens = None if self.reported is None else self.reported.get(instance.member.id, matched_tokens)
        hint_counts = True
        if reported_tokens is not None:
            matched_tokens = reported_tokens
            hint_counts = self.now - hint.since_s < speed.compute_s(hint.tokens, 0) + CLAIM_S
        if hint.tokens and hint_counts:
            hinted_blocks = min(hint.tokens, chain.tokens) // chain.block_tokens
            matched_tokens = max(matched_tokens, chain.tokens_of(hinted_blocks))
        if self.behind_s is not None:
            queue_s -= self.behind_s(instance.load.queue)
        if self.waits is not None:
            queue_s = max(queue_s, self.waits.wait_s(self.now, instance.member.id, instance.load, chain.tokens))
        if self.stored is None:
            fetch_tokens, compute_s = 0, speed.compute_s(chain.tokens - matched_tokens, matched_tokens)
        else:
            fetch_tokens, compute_s = self.stored.prefill(speed, chain.tokens, matched_tokens)
        return Candidate(
            id=instance.member.id,
            state=instance.state,
            endpoint=instance.endpoint,
            matched_tokens=matched_tokens,
            pending_tokens=load.pending_tokens,
            in_flight=load.in_flight,
            active_kv_tokens=load.active_kv_tokens,
            tokens_per_second=speed.tokens_per_second,
            queue_s=queue_s,
            compute_s=compute_s,
            reported=reported_tokens is not None,
            fetch_tokens=fetch_tokens,
        )


class Everyone:
    """Every member of a ring for one prompt: see ``dualmap.policies.situation.Everyone``."""

    def __init__(self, view: View, find_roster: Callable[[], Roster]) -> None:
        self._view = view
        self._find_roster = find_roster
        self._looked: dict[int, Candidate] = {}

    @cached_property
    def _roster(self) -> Roster:
        # Most decisions need only the pair, so the roster is read at its first use.
        return self._find_roster()

    def __len__(self) -> int:
        return len(self._roster.instances)

    def __getitem__(self, position: int) -> Candidate:
        # Policies that are compared with each other often choose the same member.
        candidate = self._looked.get(position)
        if candidate is None:
            candidate = self._looked[position] = self._view.look(self._roster.instances[position])
        return candidate

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._view.look, self._roster.instances)

    def costs_s(self, weights: Weights) -> list[float]:
        """Return each member's cost by ``weights``."""
        now, tokens, summaries = self._view.now, self._view.chain.tokens, self._roster.summaries
        # T_c is linear_s * (n - h) + quadratic_s * (n^2 - h^2) for h cached tokens of n. The first pass computes the
        # cost with h = 0, and the second pass subtracts the cached tokens.
        kv, linear, quadratic = weights.active_kv, weights.compute * tokens, weights.compute * tokens**2
        costs_s = [
            (left_s if (left_s := each.ends_s - now) > each.least_queue_s else each.least_queue_s)
            + each.linear_s * (linear + kv * each.active_kv_tokens)
            + each.quadratic_s * quadratic
            for each in summaries
        ]
        if self._view.stored is None:
            for position, cached in self._cached_tokens.items():
                each = summaries[position]
                costs_s[position] -= weights.compute * cached * (each.linear_s + each.quadratic_s * cached)
        else:
            self._subtract_saved(costs_s, weights.compute, self._view.stored)
        behind_s = self._view.behind_s
        if behind_s is not None:
            for position, instance in enumerate(self._roster.instances):
                costs_s[position] -= behind_s(instance.load.queue)
        if self._view.waits is not None:
            self._add_waits(costs_s, self._view.waits)
        return costs_s

    def pending_tokens(self) -> list[int]:
        """Return each member's pending prefill tokens."""
        return [each.pending_tokens for each in self._roster.summaries]

    def in_flight(self) -> list[int]:
        """Return each member's number of requests in flight."""
        return [each.in_flight for each in self._roster.summaries]

    def requests(self) -> list[int]:
        """Return each member's number of requests in flight and queued."""
        return [each.requests for each in self._roster.summaries]

    def placed_tokens(self) -> list[int]:
        """Return each member's KV tokens of requests in flight, plus the tokens that its queued requests will add."""
        return [each.placed_tokens for each in self._roster.summaries]

    def distinct_tokens(self) -> list[int]:
        """Return each member's ``placed_tokens`` and the prompt's; shared blocks of requests in flight count once.

        What the queued requests and the requests of others share is not known.
        """
        chain, distinct_tokens = self._view.chain, []
        first, tokens = chain.hashes[0] if chain.hashes else None, chain.tokens
        for instance, summary in zip(self._roster.instances, self._roster.summaries, strict=True):
            kv = instance.load.kv
            distinct = kv.distinct or instance.load.count_distinct()
            in_flight = summary.placed_tokens - kv.tokens + distinct.tokens
            # Most members have no prompt in flight with the first block.
            shared = distinct.shared_blocks(chain) if first in distinct.by_first else 0
            distinct_tokens.append(in_flight + tokens - chain.tokens_of(shared) if shared else in_flight + tokens)
        return distinct_tokens

    def matched_tokens(self) -> list[int]:
        """Return the number of the prompt's tokens that each member is assumed to cache."""
        matched_tokens = [0] * len(self._roster.instances)
        for position, cached in self._cached_tokens.items():
            matched_tokens[position] = cached
        return matched_tokens

    def held_tokens(self) -> list[int]:
        """Return ``matched_tokens``, or what the pool's KV store says that the member's host holds, if that is more."""
        held_tokens = self.matched_tokens()
        if self._view.stored is not None and self._view.stored.held_at:
            held_at = dict(self._view.stored.held_at)
            for position, instance in enumerate(self._roster.instances):
                held_tokens[position] = max(held_tokens[position], held_at.get(instance.member.address, 0))
        return held_tokens

    def _add_waits(self, costs_s: list[float], waits: MemoryWaits) -> None:
        """Add to the cost of each member by how much its wait for memory is longer than its T_q."""
        for member in waits.small:
            position = self._roster.ids.get(member)
            if position is not None:
                instance = self._roster.instances[position]
                queue_s = self._roster.summaries[position].queue_s(self._view.now)
                if self._view.behind_s is not None:
                    queue_s -= self._view.behind_s(instance.load.queue)
                wait_s = waits.wait_s(self._view.now, member, instance.load, self._view.chain.tokens)
                costs_s[position] += max(wait_s - queue_s, 0.0)

    def _subtract_saved(self, costs_s: list[float], weight: float, stored: StoreTier) -> None:
        """Subtract the weighted time that cached and fetched tokens save from the cost of each member."""
        for position, cached in enumerate(self.matched_tokens()):
            each = self._roster.summaries[position]
            saved_s = cached * (each.linear_s + each.quadratic_s * cached)
            if stored.tokens > cached:
                fetched_s = (stored.tokens - cached) * stored.token_s
                in_full_s = stored.tokens * (each.linear_s + each.quadratic_s * stored.tokens)
                saved_s = max(saved_s, in_full_s - fetched_s)
            costs_s[position] -= weight * saved_s

    @cached_property
    def _cached_tokens(self) -> dict[int, int]:
        """Return the cached tokens of the prompt by position, without most members that cache none."""
        positions, chain = self._roster.positions, self._view.chain
        held = self._view.tree.holders(self._view.path)
        # Most members that hold blocks of the prompt hold the same number of blocks.
        tokens = {blocks: chain.tokens_of(blocks) for blocks in set(held.values())}
        cached = {positions[index]: tokens[blocks] for index, blocks in held.items() if index in positions}
        if self._view.reported is not None:
            for member in self._view.reported:
                position = self._roster.ids.get(member)
                if position is not None:
                    recorded = cached.get(position, 0)
                    reported = self._view.reported.get(member, recorded)
                    cached[position] = recorded if reported is None else reported
        return cached
