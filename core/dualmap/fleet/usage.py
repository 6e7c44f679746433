"""Learns from the token counts that engines report: the tokens of prompts, and stale entries of an index.

**Tokens.** A prompt's tokens are estimated from its bytes. The median of recent prompts' counts corrects the estimate
for the whole pool. Only numbers of tokens change: keys and blocks stay as they are, so routers agree on them. What the
members' caches hold per block is learnt separately, from the tokens that each member had to compute.

**Stale entries.** A request with fewer cached tokens than predicted says nothing about its own prompt, which the member
has computed and cached by now. It does say that a block was missing that the member once had, at the use ``u``. Engines
evict the least recently used block first, so every block without a use after ``u`` is missing as well. The same holds
if the cache was lost as a whole. The index therefore drops these blocks. A few requests correct the index after an
unnoticed restart. No report changes the capacity that the specification or the engine states.

**Trust.** The engine counts the tokens, but a client can make the engine report few cached tokens. Therefore:

- A report counts only if its prompt tokens are usual for the pool, and if more is missing than rounding explains.
- A request counts only if nothing in its body is known to change the count (``dualmap.prompts.cached_counts``).
- The cache of a member is one cache. An engine with several data-parallel ranks has several.
- Blocks are dropped only if two reports about different prefixes miss blocks of the same age or newer. While several
  clients send requests, the reports must be from different clients. A cache salt is no client: clients choose it.
- A later report that finds an older block cancels a report that missed a newer block.
- A report that finds a dropped block refutes the drop. The pool's next drop needs twice as many reports, and so on.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import gcd, inf
from typing import NamedTuple

from dualmap.fleet.prefix_index import Computed, PrefixIndex
from dualmap.fleet.samples import RecentSamples
from dualmap.prompts.blocks import BYTES_PER_TOKEN, BlockChain
from dualmap.requests import Request, Usage

# The bounds of the estimate. Tokenizers of today's models are within them for text of all languages.
_FEWEST_BYTES_PER_TOKEN = 1.5
_MOST_BYTES_PER_TOKEN = 8.0
# The median is taken over this many prompts. The first ones stand for the prior. One client provides less than half.
_WINDOW = 63
_MOST_OF_CLIENT = 15
_PRIOR_PROMPTS = 8
# Engines add the chat template's tokens to a prompt, which would distort the estimate of shorter prompts.
_SHORTEST_PROMPT_TOKENS = 512
# The estimate follows the median if they differ by more than this part after so many prompts in a row. A mix of
# languages therefore does not change it with every request.
_TOLERANCE = 0.02
_PERSISTENT_PROMPTS = 16
# A prompt is usual if at least so many recent prompts differ from it by at most _SPREAD.
_FEWEST_PROMPTS = 8
# How far the parts of a prompt may differ from the whole prompt. The tokens of token ids are exact, apart from tokens
# that the engine adds.
_SPREAD = 0.15
_EXACT_SPREAD = 0.05
# The last reports of missing blocks that are kept for each member, of different prefixes.
_WITNESSES = 16
# The reports that a drop needs at first.
_FEWEST_WITNESSES = 2
# Each refuted drop doubles the number of reports that the pool's next drops need, up to _WITNESSES. The number falls
# again by half after each _DOUBT_S.
_MOST_DOUBTS = 3
_DOUBT_S = 300.0
# The dropped prefixes that are kept for each member, so that a report can refute the drop.
_DROPPED_MAX = 4096
# The last counts of cached tokens whose common divisor stands for a block of an engine that states none.
_CACHED_COUNTS = 32
# So many different counts hardly have a common divisor by chance.
_DIFFERENT_COUNTS = 8
# A client that sent a request in this time is a rival of other clients.
_RIVAL_S = 600.0


class Origin(NamedTuple):
    """Whose request it is, and whether the engine's cached tokens for it say what the engine caches.

    ``client`` is 0 for a client without a name. A cache salt is no name, because one client can send many salts.
    """

    client: int
    comparable: bool

    @classmethod
    def of(cls, request: Request) -> "Origin":
        """Return the origin of a request."""
        return cls(0 if request.client_is_salt else request.client, request.comparable)


class TokensPerBlock:
    """The estimated tokens of a full block of a pool's prompts, learnt from the engines' counts."""

    def __init__(self, block_tokens: int) -> None:
        self._lowest = block_tokens * BYTES_PER_TOKEN / _MOST_BYTES_PER_TOKEN
        self._highest = block_tokens * BYTES_PER_TOKEN / _FEWEST_BYTES_PER_TOKEN
        self._samples = RecentSamples(
            window=_WINDOW, most=_MOST_OF_CLIENT, prior=float(block_tokens), priors=_PRIOR_PROMPTS
        )
        self._prompts = 0
        # The prompts in a row after which the median differed from the estimate.
        self._differing = 0
        self.estimate = block_tokens

    def observe(self, now: float, client: int, tokens_per_block: float) -> bool:
        """Learn from a client's prompt; return False for a prompt that the engine does not read as text.

        The count of such a prompt is outside the bounds.
        """
        if not self._lowest <= tokens_per_block <= self._highest:
            return False
        self._prompts += 1
        self._samples.renew(now, client, tokens_per_block)
        median = self._samples.median
        self._differing = self._differing + 1 if abs(median - self.estimate) > _TOLERANCE * self.estimate else 0
        if self._differing >= _PERSISTENT_PROMPTS:
            self.estimate, self._differing = max(round(median), 1), 0
        return True

    def is_usual(self, tokens_per_block: float) -> bool:
        """Return whether enough recent prompts have about as many tokens per block."""
        low, high = tokens_per_block * (1.0 - _SPREAD), tokens_per_block * (1.0 + _SPREAD)
        return self._prompts >= _FEWEST_PROMPTS and self._samples.between(low, high) >= _FEWEST_PROMPTS


class _RecentClients:
    """The last two clients with a request, which is enough to know whether a client is alone."""

    def __init__(self) -> None:
        self._last = self._before = (0, -inf)

    def add(self, now: float, client: int) -> None:
        """Record a request of a client."""
        if client != self._last[0]:
            self._before = self._last
        self._last = (client, now)

    def has_rivals(self, now: float, client: int) -> bool:
        """Return whether other clients sent requests lately."""
        return any(other != client and now - at_s < _RIVAL_S for other, at_s in (self._last, self._before))


class _Doubts:
    """How many reports a drop needs, after drops that other reports refuted."""

    def __init__(self) -> None:
        self._doubts, self._at_s = 0, 0.0

    def add(self, now: float) -> None:
        """Record that a report found a dropped block."""
        self._doubts, self._at_s = min(self._left(now) + 1, _MOST_DOUBTS), now

    def needed(self, now: float) -> int:
        """Return the number of reports that a drop needs."""
        return _FEWEST_WITNESSES << self._left(now)

    def _left(self, now: float) -> int:
        return max(0, self._doubts - int((now - self._at_s) / _DOUBT_S))


class _Witness(NamedTuple):
    """A report of a missing block that was computed at ``use``, by a request dispatched at ``at_s``."""

    client: int
    run: int
    use: int
    at_s: float


class MemberReports:
    """What one member's engine has reported since it lost its cache, or since the member joined."""

    def __init__(self) -> None:
        self._witnesses: list[_Witness] = []
        self._dropped: dict[int, None] = {}
        self._cached_counts: deque[int] = deque(maxlen=_CACHED_COUNTS)
        self.reuse_step = 1
        """The tokens of which the cached tokens are a multiple; 1 while too few counts are known."""
        self._computed_tokens = self._computed_blocks = 0.0

    @property
    def tokens_per_block(self) -> float | None:
        """The mean tokens of a block that the member computed; None before the first report."""
        return self._computed_tokens / self._computed_blocks if self._computed_blocks else None

    @property
    def cached_divisor(self) -> int:
        """A multiple of the engine's block, because cached tokens are full blocks; 0 if nothing was cached."""
        return gcd(*self._cached_counts)

    def has_cached(self, cached_tokens: int) -> None:
        """Record the cached tokens of a report."""
        self._cached_counts.append(cached_tokens)
        known = {count for count in self._cached_counts if count}
        self.reuse_step = gcd(*known) if len(known) >= _DIFFERENT_COUNTS else 1

    def has_computed(self, tokens: int, tokens_per_block: float, cache_tokens: int) -> None:
        """Record computed tokens. The last ``cache_tokens`` tokens count, which are about those in the cache."""
        total = self._computed_tokens + tokens
        if total > 0.0:
            kept = min(1.0, cache_tokens / total)
            self._computed_tokens = kept * total
            self._computed_blocks = kept * (self._computed_blocks + tokens / tokens_per_block)

    def found(self, found: Computed, at_s: float) -> None:
        """Cancel earlier reports that newer blocks are missing, except reports about the found block itself."""
        self._witnesses = [
            each for each in self._witnesses if each.use < found.use or each.at_s >= at_s or each.run == found.run
        ]

    def missing(self, missing: Computed, client: int, at_s: float, *, needed: int, contested: bool) -> int:
        """Add a report; return the last use of the blocks that ``needed`` reports miss, 0 if there are fewer reports.

        If ``contested``, the other reports must be of other clients.
        """
        others = [each for each in self._witnesses if each.run != missing.run]
        uses = sorted((each.use for each in others if not (contested and each.client == client)), reverse=True)
        self._witnesses = [*others[1 - _WITNESSES :], _Witness(client, missing.run, missing.use, at_s)]
        return min(missing.use, uses[needed - 2]) if len(uses) >= needed - 1 else 0

    def drop(self, runs: Iterable[int]) -> None:
        """Record the first blocks of the runs that were dropped."""
        self._dropped.update(dict.fromkeys(runs))
        while len(self._dropped) > _DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def take_dropped(self, block: int) -> bool:
        """Return whether a block begins a dropped run, and forget that it does."""
        if block not in self._dropped:
            return False
        del self._dropped[block]
        return True


class Prediction(NamedTuple):
    """What the router assumed of a request when it was dispatched.

    ``reports`` is what the member's engine has reported so far. ``computed`` are the parts of the prompt that the
    member is known to have had in its cache. ``was_dropped`` is true if the next block of the prompt was dropped.
    ``engine_block_tokens`` is the block of the member's engine, None if it is not known. ``is_held`` is true if KV
    events reported the matched blocks, and ``is_stored`` if the pool's KV store held more of the prompt. A prediction
    holds no index: the router keeps the predictions of ended requests for long.
    """

    member: str
    reports: MemberReports
    origin: Origin
    at_s: float
    tokens: int
    block_tokens: int
    exact: bool
    matched_tokens: int
    computed: tuple[Computed, ...]
    was_dropped: bool
    engine_block_tokens: int | None
    is_held: bool = False
    is_stored: bool = False


def predict(
    now: float,
    chain: BlockChain,
    *,
    member: str,
    index: PrefixIndex,
    reports: MemberReports,
    origin: Origin,
    matched_tokens: int,
    engine_block_tokens: int | None = None,
) -> Prediction:
    """Return the prediction for a prompt that is dispatched to the index's member."""
    matched_blocks = matched_tokens // chain.block_tokens
    return Prediction(
        member=member,
        reports=reports,
        origin=origin,
        at_s=now,
        tokens=chain.tokens,
        block_tokens=chain.block_tokens,
        exact=chain.exact,
        matched_tokens=matched_tokens,
        computed=index.computed(chain.hashes[:matched_blocks]) if matched_blocks else (),
        was_dropped=matched_blocks < len(chain.hashes) and reports.take_dropped(chain.hashes[matched_blocks]),
        engine_block_tokens=engine_block_tokens,
    )


class UsageReports:
    """What the engines' reports teach about one pool's prompts and indexes.

    ``longest_tokens`` is the number of tokens after which the router cuts a prompt.
    """

    def __init__(self, block_tokens: int, longest_tokens: int) -> None:
        self.longest_tokens = longest_tokens
        self._block_tokens = block_tokens
        self._tokens = TokensPerBlock(block_tokens)
        self._clients = _RecentClients()
        self._doubts = _Doubts()

    @property
    def block_tokens(self) -> int:
        """The estimated tokens of a full block."""
        return self._tokens.estimate

    def on_dispatched(self, now: float, origin: Origin) -> None:
        """Record that a request is sent to a member."""
        self._clients.add(now, origin.client)

    def learn(self, now: float, prediction: Prediction, usage: Usage, *, index: PrefixIndex, cache_tokens: int) -> None:
        """Compare the counts of an ended request with its prediction; correct the index of its member.

        ``cache_tokens`` is the size of the member's cache.
        """
        if not usage.prompt_tokens or not prediction.tokens:
            return
        tokens_per_block = usage.prompt_tokens / prediction.tokens * prediction.block_tokens
        uncut_tokens = prediction.tokens * self._block_tokens / prediction.block_tokens
        is_text = not prediction.exact and _SHORTEST_PROMPT_TOKENS <= uncut_tokens < self.longest_tokens
        if is_text:
            is_text = self._tokens.observe(now, prediction.origin.client, tokens_per_block)
        cached_tokens = usage.cached_tokens
        if cached_tokens is not None and cached_tokens > usage.prompt_tokens:
            return
        if is_text:
            new_tokens = usage.prompt_tokens - (cached_tokens or 0)
            prediction.reports.has_computed(new_tokens, tokens_per_block, cache_tokens)
        if cached_tokens is None or not prediction.origin.comparable:
            return
        prediction.reports.has_cached(cached_tokens)
        if prediction.exact:
            is_usual = abs(tokens_per_block / prediction.block_tokens - 1.0) <= _EXACT_SPREAD
        else:
            is_usual = self._tokens.is_usual(tokens_per_block)
        if is_usual:
            self._compare(now, prediction, index, cached_tokens, tokens_per_block)

    def _compare(
        self, now: float, prediction: Prediction, index: PrefixIndex, cached_tokens: int, tokens_per_block: float
    ) -> None:
        reports, spread = prediction.reports, _EXACT_SPREAD if prediction.exact else _SPREAD
        predicted_blocks = prediction.matched_tokens // prediction.block_tokens
        cached_blocks = cached_tokens / tokens_per_block
        # Prompts differ from each other; a part of one may differ as much.
        found = _last(prediction.computed, cached_blocks * (1.0 - spread))
        if found is not None:
            reports.found(found, prediction.at_s)
        engine_block_tokens = prediction.engine_block_tokens or reports.cached_divisor or prediction.block_tokens
        rounding_blocks = 1.0 + engine_block_tokens / tokens_per_block
        if prediction.was_dropped and cached_blocks * (1.0 - spread) - rounding_blocks > predicted_blocks:
            self._doubts.add(now)
        if cached_blocks >= predicted_blocks * (1.0 - spread) - rounding_blocks:
            return
        missing = _first_behind(prediction.computed, cached_blocks * (1.0 + spread) + rounding_blocks)
        if missing is not None:
            client = prediction.origin.client
            contested = self._clients.has_rivals(now, client)
            use = reports.missing(
                missing, client, prediction.at_s, needed=self._doubts.needed(now), contested=contested
            )
            reports.drop(index.drop_unused_since(use))


def _last(computed: Sequence[Computed], blocks: float) -> Computed | None:
    """Return the last part that ends within the first ``blocks`` blocks."""
    return next((each for each in reversed(computed) if each.blocks <= blocks), None)


def _first_behind(computed: Sequence[Computed], blocks: float) -> Computed | None:
    """Return the first part that ends behind the first ``blocks`` blocks."""
    return next((each for each in computed if each.blocks > blocks), None)
