"""Learns from the token counts that engines report: the tokens of a block of text, and stale entries of an index.

**Tokens.** A prompt's tokens are estimated from its bytes. The median of recent prompts' counts corrects the estimate
for the whole pool. Only numbers of tokens change: keys and blocks stay as they are, so routers agree on them.

**Stale entries.** A request with fewer cached tokens than predicted says nothing about its own prompt, which the member
has computed and cached by now. It does say that a block was missing that the member once had, at the use ``u``. Engines
evict the least recently used block first, so every block without a use after ``u`` is missing as well. The same holds
if the cache was lost as a whole. The index therefore drops these blocks and lowers its limit a little. A few requests
correct the index after an unnoticed restart. If the cache is smaller than ``cacheTokens``, or other traffic uses a part
of it, the limit approaches the size that is left. A request with more cached tokens than predicted raises the limit.

**Trust.** The engine counts the tokens, but a client can make the engine report few cached tokens: a request for the
log probabilities of its prompt reads no cache in vLLM. Therefore:

- A report counts only if its prompt tokens agree with the estimate, and if more is missing than rounding explains.
- Blocks are dropped only if two reports about different prefixes miss blocks of the same age or newer. While several
  clients send requests, the reports must be from different clients.
- A later report that finds an older block cancels a report that missed a newer block.

A client can drop entries only while no other client's requests contradict it, and a dropped entry costs one worse
choice: the next request with that prefix adds it again.
"""

from collections.abc import Sequence
from math import gcd, inf
from typing import NamedTuple

from dualmap.fleet.prefix_index import Computed, PrefixIndex
from dualmap.fleet.samples import RecentSamples
from dualmap.prompts.blocks import BYTES_PER_TOKEN, BlockChain
from dualmap.requests import Usage

# The bounds of the estimate. Tokenizers of today's models are within them for text of all languages.
_FEWEST_BYTES_PER_TOKEN = 1.5
_MOST_BYTES_PER_TOKEN = 8.0
# The median is taken over this many prompts. The first ones stand for the prior. One client provides less than half.
_WINDOW = 31
_MOST_OF_CLIENT = 15
_PRIOR_PROMPTS = 8
# Engines add the chat template's tokens to a prompt, which would distort the estimate of shorter prompts.
_SHORTEST_PROMPT_TOKENS = 512
# The estimate follows the median if they differ by more than this part, so that it does not change with every request.
_TOLERANCE = 0.02
# Prompts differ from the pool's median. With fewer prompts than this, their spread is unknown.
_FEWEST_PROMPTS = 8
# The part of prompts that is outside the spread, at each end; and the smallest spread that is assumed.
_OUTLIERS = 0.25
_LEAST_SPREAD = 0.05
# The last reports of missing blocks that are kept for each member.
_WITNESSES = 8


class TokensPerBlock:
    """The estimated tokens of a full block of a pool's prompts, learnt from the engines' counts."""

    def __init__(self, block_tokens: int) -> None:
        self._lowest = block_tokens * BYTES_PER_TOKEN / _MOST_BYTES_PER_TOKEN
        self._highest = block_tokens * BYTES_PER_TOKEN / _FEWEST_BYTES_PER_TOKEN
        self._samples = RecentSamples(
            window=_WINDOW, most=_MOST_OF_CLIENT, prior=float(block_tokens), priors=_PRIOR_PROMPTS
        )
        self._prompts = 0
        self.estimate = block_tokens

    @property
    def spread(self) -> float:
        """How far prompts differ from the estimate, as a part of it; infinity while few prompts are known."""
        if self._prompts < _FEWEST_PROMPTS:
            return inf
        ordered = self._samples.ordered
        outliers = int(len(ordered) * _OUTLIERS)
        return max((ordered[-1 - outliers] - ordered[outliers]) / self.estimate, _LEAST_SPREAD)

    def observe(self, now: float, client: int, tokens_per_block: float) -> None:
        """Learn from a client's prompt. A count outside the bounds is of a prompt that the engine reads differently."""
        if not self._lowest <= tokens_per_block <= self._highest:
            return
        self._prompts += 1
        self._samples.renew(now, client, tokens_per_block)
        median = self._samples.median
        if abs(median - self.estimate) > _TOLERANCE * self.estimate:
            self.estimate = max(round(median), 1)

    def has_rivals(self, now: float, client: int) -> bool:
        """Return whether other clients' prompts were counted lately."""
        return self._samples.has_rivals(now, client)


class _Witness(NamedTuple):
    """A report of a missing block that was computed at ``use``, by a request dispatched at ``at_s``."""

    client: int
    run: int
    use: int
    at_s: float


class Witnesses:
    """The reports of blocks that one member's index has and the member's cache did not have."""

    def __init__(self) -> None:
        self._witnesses: list[_Witness] = []

    def found(self, found: Computed, at_s: float) -> None:
        """Cancel earlier reports that newer blocks are missing, except reports about the found block itself."""
        self._witnesses = [
            each for each in self._witnesses if each.use < found.use or each.at_s >= at_s or each.run == found.run
        ]

    def missing(self, missing: Computed, client: int, at_s: float, *, contested: bool) -> int:
        """Add a report; return the last use of the blocks that two reports miss, 0 if there is no second report.

        If ``contested``, the second report must be of another client.
        """
        uses = [
            each.use
            for each in self._witnesses
            if each.run != missing.run and not (contested and each.client == client)
        ]
        self._witnesses = [*self._witnesses[1 - _WITNESSES :], _Witness(client, missing.run, missing.use, at_s)]
        return min(missing.use, max(uses, default=0))


class Prediction(NamedTuple):
    """What the router assumed of a request when it was dispatched.

    ``blocks`` is the index of the request's member. ``computed`` are the parts of the prompt that the member is known
    to have had in its cache. ``engine_block_tokens`` is the block of the member's engine, None if it is not known.
    """

    blocks: PrefixIndex
    witnesses: Witnesses
    client: int
    at_s: float
    tokens: int
    block_tokens: int
    exact: bool
    matched_tokens: int
    computed: tuple[Computed, ...]
    engine_block_tokens: int | None


def predict(
    now: float,
    chain: BlockChain,
    *,
    index: PrefixIndex,
    witnesses: Witnesses,
    client: int,
    matched_tokens: int,
    engine_block_tokens: int | None = None,
) -> Prediction:
    """Return the prediction for a prompt that is dispatched to the index's member."""
    matched_blocks = matched_tokens // chain.block_tokens
    return Prediction(
        blocks=index,
        witnesses=witnesses,
        client=client,
        at_s=now,
        tokens=chain.tokens,
        block_tokens=chain.block_tokens,
        exact=chain.exact,
        matched_tokens=matched_tokens,
        computed=index.computed(chain.hashes[:matched_blocks]) if matched_blocks else (),
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
        # A multiple of the block of all engines without a known block: cached tokens are full blocks.
        self._cached_divisor = 0

    @property
    def block_tokens(self) -> int:
        """The estimated tokens of a full block."""
        return self._tokens.estimate

    def learn(self, now: float, prediction: Prediction, usage: Usage) -> None:
        """Compare the counts of an ended request with its prediction."""
        if not usage.prompt_tokens or not prediction.tokens:
            return
        tokens_per_block = usage.prompt_tokens / prediction.tokens * prediction.block_tokens
        uncut_tokens = prediction.tokens * self._block_tokens / prediction.block_tokens
        if not prediction.exact and _SHORTEST_PROMPT_TOKENS <= uncut_tokens < self.longest_tokens:
            self._tokens.observe(now, prediction.client, tokens_per_block)
        if usage.cached_tokens is None or usage.cached_tokens > usage.prompt_tokens:
            return
        if prediction.engine_block_tokens is None:
            self._cached_divisor = gcd(self._cached_divisor, usage.cached_tokens)
        spread = self._tokens.spread
        expected = prediction.block_tokens if prediction.exact else self._tokens.estimate
        if abs(tokens_per_block / expected - 1.0) <= spread < 1.0:
            self._compare(now, prediction, usage.cached_tokens, tokens_per_block, spread)

    def _compare(
        self, now: float, prediction: Prediction, cached_tokens: int, tokens_per_block: float, spread: float
    ) -> None:
        predicted_blocks = prediction.matched_tokens // prediction.block_tokens
        cached_blocks = cached_tokens / tokens_per_block
        # The spread is about whole prompts; a part of one may differ as much.
        found = _last(prediction.computed, cached_blocks * (1.0 - spread))
        if found is not None:
            prediction.witnesses.found(found, prediction.at_s)
        engine_block_tokens = prediction.engine_block_tokens or self._cached_divisor or prediction.block_tokens
        rounding_blocks = 1.0 + engine_block_tokens / tokens_per_block
        if cached_blocks * (1.0 - spread) - rounding_blocks > predicted_blocks:
            prediction.blocks.grow()
        if cached_blocks >= predicted_blocks * (1.0 - spread) - rounding_blocks:
            return
        missing = _first_behind(prediction.computed, cached_blocks * (1.0 + spread) + rounding_blocks)
        if missing is not None:
            contested = self._tokens.has_rivals(now, prediction.client)
            use = prediction.witnesses.missing(missing, prediction.client, prediction.at_s, contested=contested)
            prediction.blocks.drop_unused_since(use)


def _last(computed: Sequence[Computed], blocks: float) -> Computed | None:
    """Return the last part that ends within the first ``blocks`` blocks."""
    return next((each for each in reversed(computed) if each.blocks <= blocks), None)


def _first_behind(computed: Sequence[Computed], blocks: float) -> Computed | None:
    """Return the first part that ends behind the first ``blocks`` blocks."""
    return next((each for each in computed if each.blocks > blocks), None)
