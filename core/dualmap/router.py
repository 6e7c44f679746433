"""One pool's router: a synchronous, sans-IO object that turns requests into decisions.

Inputs and ``now`` (monotonic seconds) go in, values come out; ``next_deadline`` tells the driver when to call
``on_deadline``. The gRPC server drives it with the event loop's clock, the simulator with a heap. It composes the rooms
of a request's walk (docs/architecture.md): hotness gives the key, the rings the pair, index, ledger and estimate what
each candidate holds, owes and would take, the policy the choice.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from xxhash import xxh3_64_intdigest

from dualmap.blocks import BlockChain
from dualmap.hotness import HotnessTree
from dualmap.ledger import Entry, Ledger
from dualmap.policies import POLICIES
from dualmap.pool import Member, Pool
from dualmap.prefix_index import PrefixIndex
from dualmap.receipt import CandidateReceipt, Key, Receipt
from dualmap.requests import (
    Completion,
    Decision,
    EndpointStatus,
    FirstToken,
    PoolStatus,
    Reason,
    Refusal,
    Request,
    Usage,
)
from dualmap.rings import DualRing
from dualmap.situation import Candidate, Choice, Situation

_SUBSET_RINGS = 256


class PoolRouter:
    """Routes the requests of one pool and keeps the books about its members."""

    def __init__(self, pool: Pool) -> None:
        self._ledger = Ledger(pool.engine.prefill_tokens_per_second)
        self._sequence = 0
        self._bodiless_sequence = 0
        self._tree: HotnessTree
        self._indexes: dict[str, PrefixIndex]
        self._adopt(pool)

    @property
    def pool(self) -> Pool:
        """The pool as last given."""
        return self._pool

    def on_request(self, now: float, request: Request) -> Decision | Refusal:
        """Choose the instance of a request and book it there; or refuse it when no member is eligible."""
        ring = self._ring_for(request.subset)
        if not ring.members:
            return Refusal(request_id=request.id, reason=Reason.NO_ENDPOINT)
        key = self._key(now, request)
        pair = tuple(self._candidate(now, self._members[member], request.chain) for member in ring.pair(key.hash))
        situation = Situation(
            request_id=request.id,
            prompt_tokens=request.chain.tokens,
            waited_s=max(0.0, now - request.arrived_s),
            sequence=self._sequence,
            slo_ttft_s=self._pool.slo.ttft_s,
            spill=self._pool.routing.spill,
            pair=pair,
            everyone=_Candidates(lambda member: self._candidate(now, member, request.chain), ring.members),
        )
        self._sequence += 1
        choice = self._policy.choose(situation)
        self._book(now, request, choice.candidate)
        return Decision(
            request_id=request.id,
            endpoints=_endpoints(choice.candidate, pair),
            receipt=self._receipt(key, situation, choice),
        )

    def any_endpoints(self, subset: frozenset[str] | None) -> tuple[str, ...]:
        """Return up to two endpoints for a request without a prompt, in turn; empty when no member is eligible."""
        members = self._ring_for(subset).members
        turn = self._bodiless_sequence
        self._bodiless_sequence += 1
        return tuple(members[(turn + step) % len(members)].endpoint for step in range(min(2, len(members))))

    def on_served(self, now: float, request_id: str, endpoint: str) -> bool:
        """Move a request's books to the member that really served it; return whether that was another than chosen."""
        entry = self._ledger.entry(request_id)
        if entry is None:
            return False
        chosen = self._members.get(entry.member)
        served = next((each for each in self._members.values() if each.endpoint == endpoint), None)
        if served is None or served is chosen:
            return False
        self._forget_uncomputed(entry)
        candidate = self._candidate(now, served, entry.chain)
        self._ledger.move(
            now, entry, to=served.id, matched_tokens=candidate.matched_tokens, compute_s=candidate.compute_s
        )
        self._indexes[served.id].add(entry.chain.cacheable)
        return True

    def on_first_token(self, now: float, request_id: str) -> FirstToken | None:
        """Release a request's pending prefill; None when it is unknown or was released before."""
        entry = self._ledger.first_token(now, request_id)
        if entry is None:
            return None
        if entry.member in self._indexes:
            # Now it is certain, and used now; it may even have been forgotten for a request that was broken off.
            self._indexes[entry.member].add(entry.chain.cacheable)
        ttft_s = now - entry.arrived_s
        return FirstToken(
            member=entry.member,
            ttft_s=ttft_s,
            predicted_ttft_s=entry.predicted_ttft_s,
            within_slo=ttft_s <= self._pool.slo.ttft_s,
        )

    def on_finished(self, now: float, request_id: str, usage: Usage | None = None) -> Completion | None:
        """Close the books on a request that ended, with the engine's token counts where known; None when unknown."""
        entry = self._ledger.leave(now, request_id)
        return None if entry is None else _completion(entry, usage)

    def on_aborted(self, now: float, request_id: str) -> Completion | None:
        """Close the books on a request that was cancelled or failed; None when it is unknown or has ended."""
        entry = self._ledger.leave(now, request_id)
        return None if entry is None else self._broken_off(entry)

    def on_heard(self, now: float, request_id: str) -> None:
        """Take note that a request is alive, so that it does not expire; nothing happens when it is unknown."""
        self._ledger.heard(now, request_id)

    def on_pool(self, now: float, pool: Pool) -> None:
        """Take a new version of the pool: members come, change and go; live requests stay in the books."""
        assert pool.id == self._pool.id, f"router of {self._pool.id} was given {pool.id}"
        previous, indexes = self._pool, self._indexes
        tree = self._tree
        self._adopt(pool)
        if pool.routing.prefix == previous.routing.prefix:
            self._tree = tree
        if pool.routing.prefix.block_tokens == previous.routing.prefix.block_tokens:
            # Another address under the same id is a restarted instance: it keeps its keys, but its cache is empty.
            known = {member.id: member.endpoint for member in previous.members}
            for member in pool.members:
                if known.get(member.id) == member.endpoint:
                    self._indexes[member.id] = indexes[member.id]
                    self._indexes[member.id].resize(_capacity_blocks(pool))
        self._ledger.set_prior(pool.engine.prefill_tokens_per_second)
        self._ledger.retain(set(self._members))

    def next_deadline(self) -> float | None:
        """Return when ``on_deadline`` wants to be called next, or None."""
        return self._ledger.next_expiry()

    def on_deadline(self, now: float) -> tuple[Completion, ...]:
        """Do what is due: close the books on requests that nothing was heard of for too long, and return them."""
        return tuple(self._broken_off(entry) for entry in self._ledger.expire(now))

    def status(self) -> PoolStatus:
        """Return what this router knows of the pool at this moment."""
        return PoolStatus(
            pool=self._pool.id,
            ring_version=self._pool.ring_version,
            held=0,
            sessions=0,
            peers=0,
            endpoints=tuple(self._endpoint_status(member) for member in self._members.values()),
            hotness_nodes=self._tree.nodes,
            split_prefixes=self._tree.split_prefixes,
        )

    def _adopt(self, pool: Pool) -> None:
        """Build everything that follows from the pool alone."""
        prefix = pool.routing.prefix
        self._pool = pool
        self._policy = POLICIES[pool.routing.policy]
        self._members: dict[str, Member] = {member.id: member for member in pool.members}
        self._ring = DualRing(pool.members, pool.routing.ring)
        self._subset_rings: dict[frozenset[str], DualRing] = {}
        self._tree = HotnessTree(
            initial_blocks=prefix.initial_blocks, max_blocks=prefix.max_blocks, window_s=prefix.window_s
        )
        self._indexes = {member.id: PrefixIndex(_capacity_blocks(pool)) for member in pool.members}

    def _ring_for(self, subset: frozenset[str] | None) -> DualRing:
        """Return the rings over the members a request may use. A bare ip in the subset allows any port of it."""
        if subset is None:
            return self._ring
        ring = self._subset_rings.get(subset)
        if ring is None:
            allowed = [each for each in self._pool.members if each.endpoint in subset or each.address in subset]
            ring = DualRing(allowed, self._pool.routing.ring)
            if len(self._subset_rings) >= _SUBSET_RINGS:
                self._subset_rings.clear()
            self._subset_rings[subset] = ring
        return ring

    def _key(self, now: float, request: Request) -> Key:
        # Shares are judged by the whole ring, also for a request that may use only part of it: keys are the pool's.
        hashes, rule, members = request.chain.hashes, self._policy.hotness, len(self._ring.members)
        if not hashes:
            # A prompt without text has no prefix to share; its own id spreads such requests over the pool.
            return Key(hash=xxh3_64_intdigest(request.id.encode()), blocks=0, tokens=0)
        if rule is None:
            blocks = min(len(hashes), self._pool.routing.prefix.initial_blocks)
        else:
            blocks = self._tree.key_blocks(
                now, hashes, split_share=rule.split / members, merge_share=rule.merge / members
            )
        return Key(hash=hashes[blocks - 1], blocks=blocks, tokens=request.chain.tokens_of(blocks))

    def _candidate(self, now: float, member: Member, chain: BlockChain) -> Candidate:
        load = self._ledger.load(member.id)
        load.settle(now)
        matched_tokens = chain.tokens_of(self._indexes[member.id].matched_blocks(chain.hashes))
        speed = load.speed
        return Candidate(
            id=member.id,
            state=member.state.value,
            endpoint=member.endpoint,
            matched_tokens=matched_tokens,
            pending_tokens=load.pending_prefill_tokens,
            in_flight=load.in_flight,
            active_kv_tokens=load.active_kv_tokens,
            tokens_per_second=speed.tokens_per_second,
            queue_s=load.queue_s(now, self._pool.routing.rebalance.decode_stall_s),
            compute_s=speed.compute_s(chain.tokens - matched_tokens, matched_tokens),
        )

    def _book(self, now: float, request: Request, candidate: Candidate) -> None:
        entry = Entry(
            request_id=request.id,
            member=candidate.id,
            chain=request.chain,
            matched_tokens=candidate.matched_tokens,
            arrived_s=request.arrived_s,
            dispatched_s=now,
            predicted_ttft_s=max(0.0, now - request.arrived_s) + candidate.ttft_s,
            compute_s=candidate.compute_s,
            heard_s=now,
            streamed=request.streamed,
        )
        self._ledger.enter(now, entry)
        self._indexes[candidate.id].add(request.chain.cacheable)

    def _broken_off(self, entry: Entry) -> Completion:
        """Report a request that nothing good came of."""
        if not entry.prefilled:
            # An engine that fails at once must not attract the next request by a cache it never filled.
            self._forget_uncomputed(entry)
        return _completion(entry, None)

    def _forget_uncomputed(self, entry: Entry) -> None:
        """Take back that a member would hold a prompt it never computed; what it held before stays."""
        if entry.member in self._indexes:
            held_blocks = entry.matched_tokens // entry.chain.block_tokens
            self._indexes[entry.member].remove(entry.chain.cacheable[held_blocks:])

    def _receipt(self, key: Key, situation: Situation, choice: Choice) -> Receipt:
        chosen = choice.candidate
        considered: Sequence[Candidate] = situation.pair
        if all(chosen.id != each.id for each in considered):
            considered = (*considered, chosen)
        return Receipt(
            pool=self._pool.id,
            policy=self._policy.name,
            rule=choice.rule.name,
            reason=choice.rule.meaning,
            key=key,
            pair=tuple(each.id for each in situation.pair),
            chosen=chosen.id,
            address=chosen.endpoint,
            prompt_tokens=situation.prompt_tokens,
            matched_tokens=chosen.matched_tokens,
            predicted_ttft_s=situation.waited_s + chosen.ttft_s,
            candidates=tuple(
                CandidateReceipt(
                    id=each.id,
                    state=each.state,
                    matched_tokens=each.matched_tokens,
                    pending_tokens=each.pending_tokens,
                    in_flight=each.in_flight,
                    ttft_s=situation.waited_s + each.ttft_s,
                )
                for each in considered
            ),
        )

    def _endpoint_status(self, member: Member) -> EndpointStatus:
        load = self._ledger.load(member.id)
        return EndpointStatus(
            id=member.id,
            endpoint=member.endpoint,
            state=member.state.value,
            weight=member.weight,
            in_flight=load.in_flight,
            held=0,
            pending_prefill_tokens=load.pending_prefill_tokens,
            held_prefill_tokens=0,
            active_kv_tokens=load.active_kv_tokens,
            indexed_blocks=len(self._indexes[member.id]),
            prefill_tokens_per_second=load.speed.tokens_per_second,
            suspended=False,
        )


class _Candidates(Sequence[Candidate]):
    """Members as candidates, each computed when it is looked at."""

    def __init__(self, look: Callable[[Member], Candidate], members: Sequence[Member]) -> None:
        self._look = look
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self._look(member) for member in self._members[index]]
        return self._look(self._members[index])

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._look, self._members)


def _endpoints(chosen: Candidate, pair: tuple[Candidate, ...]) -> tuple[str, ...]:
    """Return the chosen endpoint, then the one Envoy shall try when that refuses the connection."""
    fallback = next((each.endpoint for each in pair if each.id != chosen.id), None)
    return (chosen.endpoint,) if fallback is None else (chosen.endpoint, fallback)


def _capacity_blocks(pool: Pool) -> int:
    return pool.engine.cache_tokens // pool.routing.prefix.block_tokens


def _completion(entry: Entry, usage: Usage | None) -> Completion:
    return Completion(
        member=entry.member,
        predicted_cached_tokens=entry.matched_tokens,
        measured_cached_tokens=None if usage is None else usage.cached_tokens,
    )
