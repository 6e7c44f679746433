"""What each member of a pool is assumed to cache: an index per member, which profiles and engines' counts correct.

The capacity of an index is the member's cache in blocks: the cache in tokens is from the member's profile or the
specification, and the tokens of a block are the mean of the tokens that the member computed. Before the first report of
a member, the pool's estimate of the tokens per block is used.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from dualmap.engines.profiles import Profiles
from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree
from dualmap.fleet.usage import MemberReports, Origin, Prediction, UsageReports, predict
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import MAX_BLOCKS, BlockChain
from dualmap.requests import Request, Usage


@dataclass(slots=True)
class _Cache:
    """The assumed blocks of one member, and what its engine has reported about its cache."""

    index: PrefixIndex
    reports: MemberReports = field(default_factory=MemberReports)


class Caches:
    """The assumed caches of a pool's members. ``profiles`` are of the same pool."""

    def __init__(self, pool: Pool, profiles: Profiles) -> None:
        self._pool = pool
        self._profiles = profiles
        self._usage = _usage_reports(pool)
        self.tree = PrefixTree()
        """The tree of all members' indexes."""
        self._caches = {member.id: self._new_cache(member.id) for member in pool.members}

    def index(self, member: str) -> PrefixIndex:
        """Return the index of a member; the member has the same index until it leaves or restarts."""
        return self._caches[member].index

    def adopt(self, pool: Pool, stayed: Collection[str]) -> None:
        """Apply a new version of the pool; only the members in ``stayed`` keep their blocks."""
        if pool.routing.prefix.block_tokens != self._pool.routing.prefix.block_tokens:
            self._usage, self.tree, self._caches = _usage_reports(pool), PrefixTree(), {}
        self._pool = pool
        self._usage.longest_tokens = pool.engine.max_model_len
        for member in self._caches.keys() - stayed:
            self._caches.pop(member).index.clear()
        for member in self._caches:
            self.resize(member)
        for member in {each.id for each in pool.members} - self._caches.keys():
            self._caches[member] = self._new_cache(member)

    @property
    def block_tokens(self) -> int:
        """The estimated tokens of a full block of text."""
        return self._usage.block_tokens

    def reuse_step(self, member: str) -> int:
        """Return the tokens of which a member's engine reuses a multiple, as far as its counts show."""
        return self._caches[member].reports.reuse_step

    def resize(self, member: str) -> None:
        """Set the capacity of a member's index again, after its profile has changed."""
        cache = self._caches[member]
        cache.index.resize(self._blocks(self._profiles.cache_tokens(member), cache.reports))

    def forget(self, member: str) -> None:
        """Remove a member's blocks and what counts taught about its cache: its engine has lost the cache."""
        cache = self._caches[member]
        cache.index.clear()
        cache.reports = MemberReports()

    def recounted(self, request: Request) -> Request:
        """Return a request with the tokens of its prompt: the number of its ids, or the estimate from engines' counts.

        The prompt has at most the tokens of the pool's longest prompt, even if another router states more.
        """
        chain, block_tokens, longest = request.chain, self._usage.block_tokens, self._pool.engine.max_model_len
        if request.tokens is not None and not chain.exact:
            return request._replace(chain=chain.counted(min(request.tokens.count, longest)))
        if chain.block_tokens != block_tokens and not chain.exact:
            chain = chain.recounted(block_tokens)
        if chain.tokens > longest:
            chain = chain.bounded(longest)
        return request if chain is request.chain else request._replace(chain=chain)

    def add(self, member: str, chain: BlockChain, *, computed: bool = False) -> None:
        """Record that a member caches a prompt or will cache it; ignore a member that has left.

        ``computed`` is true if the member's prefill of the prompt has ended.
        """
        if member in self._caches:
            self._caches[member].index.add(chain.cacheable, computed=computed)

    def add_placed(self, member: str, hashes: tuple[int, ...]) -> tuple[int, ...]:
        """Record and return the blocks that another replica sent to a member, up to those of the longest prompt."""
        longest = self._pool.engine.max_model_len // self._pool.routing.prefix.block_tokens
        recorded = hashes[: min(longest, MAX_BLOCKS)]
        self._caches[member].index.add(recorded)
        return recorded

    def cut(self, member: str, chain: BlockChain, matched_tokens: int) -> None:
        """Record that a member did not compute the prompt after ``matched_tokens``; ignore a member that has left."""
        if member in self._caches:
            self._caches[member].index.cut(chain.cacheable, matched_tokens // chain.block_tokens)

    def predict(self, now: float, member: str, chain: BlockChain, origin: Origin, matched_tokens: int) -> Prediction:
        """Return the prediction for a prompt that is dispatched to a member."""
        cache, profile = self._caches[member], self._profiles.get(member)
        self._usage.on_dispatched(now, origin)
        if len(profile.ranks) > 1:
            # Each data-parallel rank has its own cache, and the router does not know which one serves a request.
            origin = origin._replace(comparable=False)
        return predict(
            now,
            chain,
            member=member,
            index=cache.index,
            reports=cache.reports,
            origin=origin,
            matched_tokens=matched_tokens,
            engine_block_tokens=profile.block_tokens,
        )

    def learn(self, now: float, prediction: Prediction, usage: Usage) -> None:
        """Compare the counts of an ended request with its prediction.

        Ignore a request of a member that has left or lost its cache since, and a request with blocks of another size.
        """
        member = prediction.member
        cache = self._caches.get(member)
        if cache is None or cache.reports is not prediction.reports:
            return
        cache_tokens = self._profiles.cache_tokens(member)
        self._usage.learn(now, prediction, usage, index=cache.index, cache_tokens=cache_tokens)
        cache.index.approach(self._blocks(cache_tokens, cache.reports))

    def _new_cache(self, member: str) -> _Cache:
        reports = MemberReports()
        return _Cache(PrefixIndex(self._blocks(self._profiles.cache_tokens(member), reports), self.tree), reports)

    def _blocks(self, cache_tokens: int, reports: MemberReports) -> int:
        return int(cache_tokens / (reports.tokens_per_block or self._usage.block_tokens))


def _usage_reports(pool: Pool) -> UsageReports:
    return UsageReports(pool.routing.prefix.block_tokens, pool.engine.max_model_len)
