"""What the members with KV events hold, as their engines report it.

A member whose sources are all followed needs no assumption about its cache. For a request with token ids, its reported
blocks then replace the router's own record. If messages of the member are lost, the record counts where it has more
blocks: an engine never stores a prompt again that it always reuses. For a request without token ids, and for a member
without events, the record counts as before.

An engine reports a prompt after its prefill. Until then, the prompt counts by a claim: a claim of token ids for this
router's requests, and a claim of text for requests without token ids and for those that other routers placed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dualmap.engines.events import Batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.profile import EngineProfile
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.residency import KvChange, Residency
from dualmap.engines.source import ForgetCopies, SourceState, SourceStatus
from dualmap.fleet.claims import CLAIM_MAX_S, Claims
from dualmap.fleet.event_trust import CONTRADICTED, EventTrust
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import BlockChain
from dualmap.requests import NO_EVENTS, EventsStatus, Request

# The states of a member's sources, the worst one first. A member is in the worst state of its ranks.
_WORST_FIRST: Final = (
    SourceState.FAILED,
    SourceState.CONNECTING,
    SourceState.SYNCING,
    SourceState.PARTIAL,
    SourceState.LIVE,
)
_FOLLOWED: Final = frozenset((SourceState.SYNCING, SourceState.PARTIAL, SourceState.LIVE))
# A prediction by held blocks is wrong if it differs by more than this many blocks from the engine's count.
_TOLERANCE_BLOCKS: Final = 2


@dataclass(slots=True)
class _Reporter:
    """One member with KV events."""

    residency: Residency
    claims: Claims
    text_claims: Claims = field(default_factory=Claims)
    ranks: dict[int, SourceStatus] = field(default_factory=dict)
    trust: EventTrust = field(default_factory=EventTrust)

    @property
    def followed(self) -> bool:
        """Whether the router knows what every rank holds."""
        return not self.trust.contradicted and all(
            each.state in _FOLLOWED and each.sequence is not None for each in self.ranks.values()
        )

    def fault(self, rank: int) -> str:
        """Return why the blocks of a rank are not all known, apart from lost messages; empty if they are."""
        return CONTRADICTED if self.trust.contradicted else self.residency.fault(rank)

    def end_claims(self) -> None:
        """End all claims, because the member lost its cache."""
        self.claims.clear()
        self.text_claims.clear()

    @property
    def complete(self) -> bool:
        """Whether no rank lacks blocks because of lost messages or another fault."""
        return not any(
            each.state is SourceState.PARTIAL or self.residency.fault(rank) for rank, each in self.ranks.items()
        )


class ReportedMatches:
    """How many tokens of one prompt each followed member holds, as a mapping that is computed at its first use.

    The router cuts a prompt that is longer than the model's longest one, to the tokens of ``text``.
    """

    def __init__(
        self,
        now: float,
        tokens: PromptTokens,
        text: BlockChain,
        held: HeldBlocks,
        reporters: Mapping[str, _Reporter],
        reuse_step: Callable[[str], int],
    ) -> None:
        self._now = now
        self._tokens = tokens
        self._text = text
        self._held = held
        self._reporters = reporters
        self._reuse_step = reuse_step
        self._found: dict[int, Mapping[int, int]] = {}

    def get(self, member: str, recorded_tokens: int) -> int | None:
        """Return the cached tokens of the prompt at a member; None if its record of ``recorded_tokens`` counts."""
        reporter = self._reporters.get(member)
        if reporter is None or not reporter.followed:
            return None
        return self._counted(member, reporter, max(self._tokens_at(reporter)), recorded_tokens)

    def __iter__(self) -> Iterator[str]:
        """Yield each followed member."""
        return (member for member, reporter in self._reporters.items() if reporter.followed)

    def at_dispatch(self, member: str, matched_tokens: int, recorded_tokens: int) -> int | None:
        """Return ``get`` for a member that receives the prompt now, after a wait in the queue.

        Claims count up to ``matched_tokens``, the prediction at the pick: later claims are of requests behind this one.
        """
        reporter = self._reporters.get(member)
        if reporter is None or not reporter.followed:
            return None
        held, claimed = self._tokens_at(reporter)
        return self._counted(member, reporter, max(held, min(claimed, matched_tokens)), recorded_tokens)

    def _counted(self, member: str, reporter: _Reporter, tokens: int, recorded_tokens: int) -> int | None:
        """Return how many of the cached tokens the engine reuses; None if the record counts.

        Models with several kinds of layers reuse larger steps than a block.
        """
        matched = min(tokens - tokens % self._reuse_step(member), self._text.tokens)
        return None if matched < recorded_tokens and not reporter.complete else matched

    def _tokens_at(self, reporter: _Reporter) -> tuple[int, int]:
        """Return how many tokens of the prompt a member holds, and how many are claimed for it."""
        block_tokens, text = reporter.residency.block_tokens, self._text
        blocks = reporter.text_claims.leading_blocks(self._now, text.hashes)
        if block_tokens is None:
            return 0, text.tokens_of(blocks)
        chain = self._tokens.chain(block_tokens)
        if block_tokens not in self._found:
            self._found[block_tokens] = self._held.leading_blocks(chain)
        held = reporter.residency.matched_tokens(chain, self._found[block_tokens])
        claimed = chain.reusable_tokens(reporter.claims.leading_blocks(self._now, chain.keys))
        if blocks:
            in_text = chain.reusable_tokens(min(text.tokens_of(blocks), chain.tokens) // block_tokens)
            if in_text <= held:
                reporter.text_claims.on_reported(text.hashes[blocks - 1])
            claimed = max(claimed, in_text)
        return held, claimed


class ReportedCaches:
    """The reported blocks of a pool's members. ``key`` is the key of the hashes of prompts."""

    def __init__(self, pool: Pool, key: bytes) -> None:
        self._pool = pool
        self._key = key
        self._held = HeldBlocks()
        self._reporters: dict[str, _Reporter] = {}

    def apply(
        self, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus, profile: EngineProfile
    ) -> bool:
        """Apply changes of a rank; return whether the rank lost its blocks. A source that is off is forgotten."""
        reporter = self._reporters.get(member)
        if reporter is None:
            if status.state is SourceState.OFF:
                return False
            claims = Claims()
            residency = Residency(
                self._held,
                model=self._pool.model.name,
                key=self._key,
                capacity_blocks=_capacity_blocks(profile),
                awaited=claims.awaited,
            )
            reporter = self._reporters[member] = _Reporter(residency, claims)
        self._held.clean()
        residency, cleared = reporter.residency, False
        for change in changes:
            if isinstance(change, Batch):
                before = residency.counts.cleared
                residency.apply(rank, change)
                cleared |= residency.counts.cleared != before
                for key in residency.take_arrived():
                    reporter.claims.on_reported(key)
            elif isinstance(change, ForgetCopies):
                residency.forget_copies(rank)
            else:
                residency.clear(rank)
                reporter.trust = EventTrust()
                cleared = True
        if cleared:
            reporter.end_claims()
        reporter.ranks[rank] = status
        if status.state is SourceState.OFF:
            residency.clear(rank)
            del reporter.ranks[rank]
            if not reporter.ranks:
                self._drop(member)
        return cleared

    def matches(
        self, now: float, tokens: PromptTokens | None, text: BlockChain, reuse_step: Callable[[str], int]
    ) -> ReportedMatches | None:
        """Return what the members hold of a prompt; None if nothing is known.

        ``reuse_step`` returns the tokens of which a member's engine reuses a multiple.
        """
        if tokens is None or not self._reporters:
            return None
        return ReportedMatches(now, tokens, text, self._held, self._reporters, reuse_step)

    def compute_chains(self, tokens: PromptTokens) -> None:
        """Compute the chains of a prompt in the blocks of all members' engines."""
        for reporter in self._reporters.values():
            if reporter.residency.block_tokens is not None:
                tokens.chain(reporter.residency.block_tokens)

    def claim(self, now: float, member: str, request: Request, *, predicted_ttft_s: float) -> None:
        """Claim a request's prompt for a member that will compute it, until its engine has reported the blocks."""
        reporter = self._reporters.get(member)
        if reporter is None:
            return
        expected_s = max(0.0, predicted_ttft_s - max(0.0, now - request.arrived_s))
        block_tokens, tokens = reporter.residency.block_tokens, request.tokens
        if block_tokens is None or tokens is None:
            reporter.text_claims.add(now, request.id, request.chain.cacheable, expected_s=expected_s)
            return
        chain = tokens.chain(block_tokens)
        # A hit on all blocks is not reported.
        if not reporter.residency.is_held(chain):
            reporter.claims.add(now, request.id, chain.keys, expected_s=expected_s)

    def claim_placed(
        self, now: float, member: str, hashes: tuple[int, ...], *, placed_s: float, expected_s: float
    ) -> None:
        """Claim the text blocks of a prompt that another router sent to a member at ``placed_s``."""
        reporter = self._reporters.get(member)
        # A router that starts receives old placements as well.
        if reporter is not None and hashes and now - placed_s < CLAIM_MAX_S:
            # Request ids of this router contain no space.
            reporter.text_claims.add(placed_s, f"placed {hashes[-1]:x}", hashes, expected_s=expected_s)

    def holds_matched(self, member: str, tokens: PromptTokens | None, matched_tokens: int) -> bool:
        """Return whether a member holds the matched blocks of a prompt, so that no claim explains the match."""
        reporter = self._reporters.get(member)
        if tokens is None or reporter is None or not reporter.followed:
            return False
        block_tokens = reporter.residency.block_tokens
        if block_tokens is None or matched_tokens < block_tokens:
            return matched_tokens == 0
        keys = tokens.chain(block_tokens).keys
        return reporter.residency.holds(keys[min(matched_tokens // block_tokens, len(keys)) - 1])

    def judge(
        self, now: float, member: str, client: int, *, matched_tokens: int, cached_tokens: int, step: int
    ) -> None:
        """Compare a match of held blocks with the tokens that the engine had cached; ``step`` is its reuse step."""
        reporter = self._reporters.get(member)
        if reporter is not None:
            tolerance = _TOLERANCE_BLOCKS * max(reporter.residency.block_tokens or 0, step)
            reporter.trust.judge(now, client, is_wrong=abs(cached_tokens - matched_tokens) > tolerance)

    def withdraw(self, member: str, request_id: str) -> None:
        """End the claim of a request that a member will not compute."""
        reporter = self._reporters.get(member)
        if reporter is not None:
            reporter.claims.withdraw(request_id)
            reporter.text_claims.withdraw(request_id)

    def forget_claims(self, member: str) -> None:
        """End all claims of a member that lost its cache."""
        if member in self._reporters:
            self._reporters[member].end_claims()

    def forget(self, member: str) -> None:
        """Forget the blocks and the claims of a member whose engine emptied its cache without an event."""
        reporter = self._reporters.get(member)
        if reporter is not None:
            reporter.end_claims()
            reporter.residency.clear()
            reporter.trust = EventTrust()

    def resize(self, member: str, profile: EngineProfile) -> None:
        """Take the size of a member's cache from its profile."""
        if member in self._reporters:
            self._reporters[member].residency.resize(_capacity_blocks(profile))

    def adopt(self, pool: Pool, stayed: set[str]) -> None:
        """Apply a new version of the pool; only the members in ``stayed`` keep their blocks."""
        keep = stayed if pool.engine.kv_events.enabled and pool.model.name == self._pool.model.name else set[str]()
        self._pool = pool
        for member in self._reporters.keys() - keep:
            self._drop(member)

    def status(self, member: str) -> EventsStatus:
        """Return the state of a member's KV events."""
        reporter = self._reporters.get(member)
        if reporter is None or not reporter.ranks:
            return NO_EVENTS
        ranks, faults = reporter.ranks, {rank: reporter.fault(rank) for rank in reporter.ranks}
        states = {_state(each, faults[rank]) for rank, each in ranks.items()}
        reasons = {
            rank: reason
            for rank, each in sorted(ranks.items())
            if (reason := "; ".join(text for text in (each.reason, faults[rank]) if text))
        }
        return EventsStatus(
            state=next(state for state in _WORST_FIRST if state in states),
            sequence=max((each.sequence for each in ranks.values() if each.sequence is not None), default=None),
            blocks=reporter.residency.blocks,
            gaps=sum(each.gaps for each in ranks.values()),
            resyncs=sum(each.resyncs for each in ranks.values()),
            reason=", ".join(
                f"rank {rank}: {reason}" if len(ranks) > 1 else reason for rank, reason in reasons.items()
            ),
        )

    def _drop(self, member: str) -> None:
        self._reporters.pop(member).residency.clear()


def _state(status: SourceStatus, fault: str) -> SourceState:
    return SourceState.PARTIAL if fault and status.state is SourceState.LIVE else status.state


def _capacity_blocks(profile: EngineProfile) -> int | None:
    """Return the blocks of an engine's memory. With several ranks, it is an upper bound for each of them."""
    if not profile.block_tokens or not profile.cache_tokens:
        return None
    return profile.cache_tokens // profile.block_tokens
