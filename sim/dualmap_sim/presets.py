"""Parameters of the engine model (times and memory), and its named presets.

docs/engine-model.md has the formulas. The numbers are assumptions calibrated on the text of the DualMap paper. Every
number is a field; ``dataclasses.replace`` makes a variant of a preset. ``engine.py`` uses these costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from types import MappingProxyType
from typing import Final

TRACE_BLOCK_TOKENS: Final = 512
"""Length of a prefix block in the Mooncake traces that the paper replays (appendix A.1.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds one prefill takes: ``o + (n + a/2 * ((n+h)^2 - h^2)) / r + h / l``."""

    overhead_s: float
    """``o``: paid by every prefill, whatever its length."""
    tokens_per_s: float
    """``r``: speed at which new tokens are computed while attention is still cheap."""
    attention: float
    """``a``: how much a token's cost grows with each token before it, relative to its own."""
    load_tokens_per_s: float
    """``l``: speed at which the KV of cached tokens is brought in."""

    def compute_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Return what computing ``n`` tokens takes that attend to ``h`` before them, wherever those came from."""
        total = new_tokens + cached_tokens
        attended = self.attention / 2 * (total * total - cached_tokens * cached_tokens)
        return (new_tokens + attended) / self.tokens_per_s

    def seconds(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Return the duration of a prefill of ``n`` new tokens behind ``h`` cached ones."""
        compute_s = self.compute_s(new_tokens=new_tokens, cached_tokens=cached_tokens)
        return self.overhead_s + compute_s + cached_tokens / self.load_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds one decode step takes: ``d0 + d1 * k + d2 * b`` for ``b`` requests holding ``k`` KV tokens."""

    step_s: float
    """``d0``: reading the weights once."""
    per_kv_token_s: float
    """``d1``: reading one token's KV."""
    per_request_s: float
    """``d2``: what one more request in the batch adds."""

    def steps_s(self, steps: int, *, requests: int, kv_tokens: int) -> float:
        """Return the duration of ``steps`` steps of an unchanged batch that holds ``kv_tokens`` at their
        start.

        Each step appends one token per request, so the steps' costs are an arithmetic series.
        """
        first = self.step_s + self.per_kv_token_s * kv_tokens + self.per_request_s * requests
        return steps * first + self.per_kv_token_s * requests * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, *, requests: int, kv_tokens: int) -> int:
        """Return how many whole steps of that batch fit into ``seconds``, give or take one for rounding."""
        growth = self.per_kv_token_s * requests / 2
        linear = self.step_s + self.per_kv_token_s * kv_tokens + self.per_request_s * requests - growth
        # The root of the series' quadratic, in the form that neither cancels nor divides by zero as d1 goes to 0.
        return int(2 * seconds / (linear + sqrt(linear * linear + 4 * growth * seconds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its speeds, its KV memory and its prefix cache."""

    prefill: PrefillCost
    decode: DecodeCost | None
    """None on a prefill-only instance of a disaggregated deployment: every request ends with its first token."""
    kv_memory_tokens: int
    """``m``: tokens (prompt + output) that admitted requests may hold together."""
    cache_tokens: int
    """``c``: tokens of KV kept for reuse once computed; 0 switches the prefix cache off."""
    input_tokens_max: int
    """Longest prompt: the paper caps its traces here; whoever makes requests applies it, and so does the server."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Length of a prefix block; only whole blocks are cached and reused."""
    pull_tokens_per_s: float | None = None
    """Speed at which KV can be brought from another engine; None: it cannot."""
    chunk_tokens: int | None = None
    """Most tokens one step computes, those of the decodes included (``chunked.py``); None: a prefill is one step of its
    own, before any decode."""

    def reuse_s(self, *, cached_tokens: int, pulled_tokens: int) -> float:
        """Return the seconds to load the KV of tokens that are not computed."""
        seconds = cached_tokens / self.prefill.load_tokens_per_s
        if pulled_tokens:
            assert self.pull_tokens_per_s is not None, "this engine cannot pull"
            seconds += pulled_tokens / self.pull_tokens_per_s
        return seconds

    def prefill_s(self, *, new_tokens: int, cached_tokens: int, pulled_tokens: int) -> float:
        """Return the duration of a prefill in one step of its own, behind cached and pulled tokens."""
        compute_s = self.prefill.compute_s(new_tokens=new_tokens, cached_tokens=cached_tokens + pulled_tokens)
        reuse_s = self.reuse_s(cached_tokens=cached_tokens, pulled_tokens=pulled_tokens)
        return self.prefill.overhead_s + compute_s + reuse_s


def slowed(config: EngineConfig, factor: float) -> EngineConfig:
    """Return an engine that takes ``factor`` times as long for everything it does.

    Its memory is the same, and so is the speed of pulling KV, which is the network's.
    """
    prefill, decode = config.prefill, config.decode
    return replace(
        config,
        prefill=PrefillCost(
            overhead_s=prefill.overhead_s * factor,
            tokens_per_s=prefill.tokens_per_s / factor,
            attention=prefill.attention,
            load_tokens_per_s=prefill.load_tokens_per_s / factor,
        ),
        decode=None
        if decode is None
        else DecodeCost(
            step_s=decode.step_s * factor,
            per_kv_token_s=decode.per_kv_token_s * factor,
            per_request_s=decode.per_request_s * factor,
        ),
    )


PRESETS: Final[Mapping[str, EngineConfig]] = MappingProxyType(
    {
        "7b": EngineConfig(
            prefill=PrefillCost(overhead_s=0.02, tokens_per_s=7000.0, attention=3.0e-5, load_tokens_per_s=350_000.0),
            decode=DecodeCost(step_s=0.028, per_kv_token_s=0.9e-7, per_request_s=2e-4),
            kv_memory_tokens=190_000,
            cache_tokens=1_000_000,
            input_tokens_max=20_480,
        ),
        "14b": EngineConfig(
            prefill=PrefillCost(overhead_s=0.02, tokens_per_s=4000.0, attention=3.3e-5, load_tokens_per_s=100_000.0),
            decode=DecodeCost(step_s=0.032, per_kv_token_s=1.6e-7, per_request_s=2e-4),
            kv_memory_tokens=128_000,
            cache_tokens=500_000,
            input_tokens_max=10_240,
        ),
        "pd": EngineConfig(
            prefill=PrefillCost(overhead_s=0.02, tokens_per_s=5500.0, attention=3.0e-5, load_tokens_per_s=350_000.0),
            decode=None,
            kv_memory_tokens=190_000,
            cache_tokens=1_000_000,
            input_tokens_max=20_480,
        ),
        "agent": EngineConfig(
            prefill=PrefillCost(overhead_s=0.02, tokens_per_s=14_000.0, attention=2.0e-5, load_tokens_per_s=1e7),
            decode=DecodeCost(step_s=0.018, per_kv_token_s=0.25e-7, per_request_s=1e-4),
            kv_memory_tokens=500_000,
            cache_tokens=900_000,
            input_tokens_max=131_072,
        ),
    }
)
"""The presets by name."""
