"""The inputs and outputs of an engine: requests, first tokens and ends.

``engine.py`` uses and re-exports these classes; drivers need no other module.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a request, which KV events contain.

    ``tokens`` are the packed ids of the prompt's and the answer's tokens (``dualmap.engines.token_chain``).
    """

    tokens: bytes
    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request's data for the engine."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, at least 1. The prefill yields the first token; a prefill-only engine stops after it."""
    blocks: Sequence[int] = ()
    """Chained hashes of the prompt's blocks (``EngineConfig.block_tokens``). An incomplete last block is ignored.

    The hashes of the answer's blocks may follow; only an engine with KV events caches these blocks.
    """
    priority: int = 0
    """The waiting request with the lowest number runs first. Equal numbers run in order of arrival, as in vLLM."""
    pulled_tokens: int = 0
    """Leading prompt tokens whose KV another engine holds.

    If ``EngineConfig.pull_tokens_per_s`` allows a pull, the engine pulls the tokens that are missing from its own
    cache. Otherwise the engine computes these tokens.
    """
    keeps_kv: bool = False
    """Whether the request's KV stays in memory after its end, until ``Engine.release_kv``: another engine pulls it."""
    content: Content | None = None
    """The tokens for KV events. Without content, stand-ins for the tokens are derived from ``blocks``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The end of a prefill, which yields the first token."""

    at_s: float
    request_id: str
    arrived_s: float
    prefill_started_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the engine's own cache."""
    pulled_tokens: int
    """Further prompt tokens that the engine pulled from another engine."""
    decode_step: int
    """The engine's ``decode_steps`` at the first token. The request gains one token with each later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a request: the engine generated its last token."""

    at_s: float
    request_id: str
    arrived_s: float
    output_tokens: int


EngineEvent = FirstToken | Finished
