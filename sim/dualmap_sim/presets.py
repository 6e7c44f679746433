"""Parameters of the engine model (times and memory), and its named presets.

docs/engine-model.md has the formulas. The numbers are assumptions, calibrated on the text of the DualMap paper. Every
number is a field, and ``dataclasses.replace`` makes a variant of a preset. ``engine.py`` uses these costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from types import MappingProxyType
from typing import Final

TRACE_BLOCK_TOKENS: Final = 512
"""Length of a prefix block in the Mooncake traces that the DualMap paper replays (appendix A.1.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of one prefill of ``n`` new and ``h`` cached tokens: ``o + (n + a/2 * ((n+h)^2 - h^2)) / r + h / l``."""

    overhead_s: float
    """``o``: a fixed cost of every prefill."""
    tokens_per_s: float
    """``r``: speed of computing new tokens without the cost of attention."""
    attention: float
    """``a``: increase of a token's cost per preceding token, relative to the cost without attention."""
    load_tokens_per_s: float
    """``l``: speed of loading the KV of cached tokens."""

    def compute_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Return the time to compute ``n`` tokens that attend to ``h`` preceding tokens with KV."""
        total = new_tokens + cached_tokens
        attended = self.attention / 2 * (total * total - cached_tokens * cached_tokens)
        return (new_tokens + attended) / self.tokens_per_s

    def seconds(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Return the duration of a prefill of ``n`` new tokens after ``h`` cached tokens."""
        compute_s = self.compute_s(new_tokens=new_tokens, cached_tokens=cached_tokens)
        return self.overhead_s + compute_s + cached_tokens / self.load_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Seconds of one decode step: ``d0 + d1 * k + d2 * b`` for ``b`` requests that hold ``k`` KV tokens."""

    step_s: float
    """``d0``: time to read the weights once."""
    per_kv_token_s: float
    """``d1``: time to read the KV of one token."""
    per_request_s: float
    """``d2``: additional time per request in the batch."""

    def steps_s(self, steps: int, *, requests: int, kv_tokens: int) -> float:
        """Return the duration of ``steps`` steps of an unchanged batch that holds ``kv_tokens`` at the start.

        Each step adds one token per request, so the costs of the steps are an arithmetic series.
        """
        first = self.step_s + self.per_kv_token_s * kv_tokens + self.per_request_s * requests
        return steps * first + self.per_kv_token_s * requests * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, *, requests: int, kv_tokens: int) -> int:
        """Return how many full steps of an unchanged batch fit into ``seconds``; rounding may add or subtract one."""
        growth = self.per_kv_token_s * requests / 2
        linear = self.step_s + self.per_kv_token_s * kv_tokens + self.per_request_s * requests - growth
        # The root of the series' quadratic equation. This form avoids cancellation, and division by zero if d1 is 0.
        return int(2 * seconds / (linear + sqrt(linear * linear + 4 * growth * seconds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its speeds, its KV memory and its prefix cache."""

    prefill: PrefillCost
    decode: DecodeCost | None
    """None for a prefill-only instance of a disaggregated deployment: every request ends with its first token."""
    kv_memory_tokens: int
    """``m``: KV tokens (prompt and output) that all admitted requests together may hold."""
    cache_tokens: int
    """``c``: capacity of the prefix cache in KV tokens; 0 disables the cache."""
    input_tokens_max: int
    """Longest prompt, as in the DualMap paper's traces. The experiment and the server cut longer prompts."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Length of a prefix block. Only full blocks are cached and reused."""
    pull_tokens_per_s: float | None = None
    """Speed of pulling KV from another engine; None disables pulls."""
    chunk_tokens: int | None = None
    """Maximum tokens of one step, including those of the decodes (``chunked.py``).

    None disables chunked prefill: each prefill is one step of its own, before any decode."""

    def reuse_s(self, *, cached_tokens: int, pulled_tokens: int) -> float:
        """Return the seconds to load the KV of tokens that are not computed."""
        seconds = cached_tokens / self.prefill.load_tokens_per_s
        if pulled_tokens:
            assert self.pull_tokens_per_s is not None, "this engine cannot pull"
            seconds += pulled_tokens / self.pull_tokens_per_s
        return seconds

    def prefill_s(self, *, new_tokens: int, cached_tokens: int, pulled_tokens: int) -> float:
        """Return the duration of a prefill in its own step, after cached and pulled tokens."""
        compute_s = self.prefill.compute_s(new_tokens=new_tokens, cached_tokens=cached_tokens + pulled_tokens)
        reuse_s = self.reuse_s(cached_tokens=cached_tokens, pulled_tokens=pulled_tokens)
        return self.prefill.overhead_s + compute_s + reuse_s


def slowed(config: EngineConfig, factor: float) -> EngineConfig:
    """Return an engine that takes ``factor`` times as long to prefill and to decode.

    The engine's memory stays the same. So does its speed of pulling KV, because the network limits that speed.
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
"""All presets, by name."""
