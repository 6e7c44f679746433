"""The inputs and outputs of an engine: requests, first tokens and ends.

``engine.py`` uses these and re-exports them; drivers need no other module.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request's data for the engine."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, at least 1; the first comes from the prefill. A prefill-only engine stops after it."""
    blocks: Sequence[int] = ()
    """Chained hashes of the prompt's blocks of ``EngineConfig.block_tokens``; an incomplete last one is ignored."""
    priority: int = 0
    """Waiting requests with the lowest number go first; among equals the order is that of arrival (as in vLLM)."""
    pulled_tokens: int = 0
    """Leading prompt tokens whose KV another engine holds.

    If ``EngineConfig.pull_tokens_per_s`` allows it, the engine pulls the ones its own cache lacks instead of computing
    them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A prefill ended, and with it the time to first token."""

    at_s: float
    request_id: str
    arrived_s: float
    prefill_started_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine's own cache held."""
    pulled_tokens: int
    """Prompt tokens beyond those that came from another engine."""
    decode_step: int
    """The engine's ``decode_steps`` at that moment: later the request has one token more than the steps since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request generated its last token."""

    at_s: float
    request_id: str
    arrived_s: float
    output_tokens: int


EngineEvent = FirstToken | Finished
