"""Fits the size of the engines' prefix caches, by replaying the prompts of each member in caches of several sizes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import gcd
from typing import Final

from dualmap_sim.fitting.estimates import Estimate
from dualmap_sim.fitting.replay import engine_blocks
from dualmap_sim.fitting.service import Served
from dualmap_sim.prefix_cache import PrefixCache

_GROWTH: Final = 2**0.25
"""The ratio of two sizes that are tried in turn."""
_AS_GOOD: Final = 1.1
"""Sizes with errors up to this ratio of the smallest error are within the interval."""
REQUESTS_MOST: Final = 5000
"""The fit tries sizes of the cache on at most this many requests of each member."""
_LEAST_EVICTED: Final = 0.01
"""The share of prompt tokens by which an unlimited cache must differ from the engines' for an eviction to be seen."""
_SMALLEST_BLOCKS: Final = 8
_LEAST_COUNTS: Final = 10
_DIVIDED: Final = 0.95
"""The share of cached-token counts that the block length must divide: a few may be wrong."""


def fit_block(members: Mapping[str, Sequence[Served]]) -> Estimate:
    """Estimate the block length of the engines' prefix caches, in tokens: cached tokens are whole blocks."""
    # A prompt that is cached whole says nothing, because the engine computes its last token again.
    seen = sorted(
        {each.cached_tokens for own in members.values() for each in own if each.sound and each.new_tokens > 1} - {0}
    )
    if len(seen) < _LEAST_COUNTS:
        return Estimate.absent("fewer than ten different numbers of cached tokens; prompts of many lengths show it")
    lengths = {gcd(*seen), *(gcd(one, other) for one, other in pairwise(seen))}
    length = max(each for each in lengths if sum(not count % each for count in seen) >= _DIVIDED * len(seen))
    if length == 1:
        return Estimate.absent("the numbers of cached tokens have no common divisor, so engines do not cache blocks")
    return Estimate.of(
        length, length, length, reason=f"divides {len(seen)} different numbers of cached tokens", missing=""
    )


def fit_cache(
    members: Mapping[str, Sequence[Served]], *, recorded_block_tokens: float, block_tokens: float
) -> Estimate:
    """Estimate the size of a member's prefix cache in tokens.

    ``block_tokens`` is the length of the engines' blocks, and ``recorded_block_tokens`` that of the recorded ones.
    """
    prompts = _prompts(members, recorded_block_tokens=recorded_block_tokens, block_tokens=block_tokens)
    if not any(each.cached_tokens for own in prompts for each in own):
        return Estimate.absent("no prompt had cached tokens; repeated prompts and conversations show it")
    asked = sum(each.served.prompt_tokens for own in prompts for each in own)
    largest = max(len({block for each in own for block in each.blocks}) for own in prompts)
    sizes, size = [], float(_SMALLEST_BLOCKS)
    while size < largest * _GROWTH:
        sizes.append(round(size))
        size *= _GROWTH

    def is_enough(size: int | None) -> bool:
        return _error(prompts, size, block_tokens) <= _LEAST_EVICTED * asked

    if is_enough(None):
        # The cache is larger than the largest size that explains the cached tokens worse than no limit.
        number = bisect_left(sizes, True, key=is_enough)
        held = round(sizes[number - 1] * block_tokens) if number else 0
        return Estimate.absent(
            f"evictions changed less than {_LEAST_EVICTED:.0%} of the prompt tokens: the cache holds at least "
            f"{held:,} tokens; more prompts show it"
        )
    errors = {size: _error(prompts, size, block_tokens) for size in sizes}
    best = min(errors, key=lambda size: errors[size])
    good = [size for size in sizes if errors[size] <= _AS_GOOD * errors[best]]
    return Estimate.of(
        round(best * block_tokens),
        round(good[0] / _GROWTH**0.5 * block_tokens),
        round(good[-1] * _GROWTH**0.5 * block_tokens),
        reason=f"best of {len(sizes)} sizes for the cached tokens of {sum(map(len, prompts)):,} prompts",
        missing="prompts that return after the cache has been filled several times show it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A prompt with the hashes of its full engine blocks."""

    served: Served
    blocks: Sequence[int]

    @property
    def cached_tokens(self) -> int:
        return self.served.cached_tokens if self.served.sound else 0


def _prompts(
    members: Mapping[str, Sequence[Served]], *, recorded_block_tokens: float, block_tokens: float
) -> list[list[_Prompt]]:
    apart = block_tokens / recorded_block_tokens
    return [
        [
            _Prompt(served=each, blocks=engine_blocks(each.request.chain.cacheable, apart))
            for each in served[:REQUESTS_MOST]
        ]
        for served in members.values()
    ]


def _error(prompts: Iterable[Iterable[_Prompt]], size: int | None, block_tokens: float) -> float:
    """Return the sum of the differences between predicted and measured cached tokens with caches of ``size`` blocks.

    A prompt is in the cache from its first token on. What the engine had cached before the recording does not count.
    """
    error = 0.0
    for own in prompts:
        cache, whole = PrefixCache(size), PrefixCache(None)
        computing: list[tuple[float, int, Sequence[int]]] = []
        for number, each in enumerate(own):
            while computing and computing[0][0] <= each.served.sent_s:
                _, _, blocks = heappop(computing)
                cache.insert(blocks)
                whole.insert(blocks)
            if each.served.sound:
                # An engine always computes the last token of a prompt.
                usable = each.blocks[: int((each.served.prompt_tokens - 1) / block_tokens)]
                measured = min(each.served.cached_tokens, whole.match(usable) * block_tokens)
                error += abs(cache.match(usable) * block_tokens - measured)
            computed_s = each.served.end_s if each.served.first_s is None else each.served.first_s
            heappush(computing, (computed_s, number, each.blocks))
    return error
