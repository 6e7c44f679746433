"""What goes into an engine and what comes out of it: requests, first tokens and ends.

``engine.py`` takes and makes these, and hands them on under its own name; drivers need no other module.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine needs to know of a request."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate, at least 1; the first comes from the prefill. A prefill-only engine stops after it."""
    blocks: Sequence[int] = ()
    """Chained hashes of the prompt's blocks of ``EngineConfig.block_tokens``; an incomplete last one is ignored."""
    priority: int = 0
    """Of the requests that wait, those with the lowest number go first; equals in order of arrival (as in vLLM)."""
    pulled_tokens: int = 0
    """Leading prompt tokens whose KV another engine holds: what the own cache lacks of them is brought from there
    instead of computed, if ``EngineConfig.pull_tokens_per_s`` allows it."""


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
    """The engine's ``decode_steps`` at that moment: afterwards the request has one token more than steps since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request generated its last token."""

    at_s: float
    request_id: str
    arrived_s: float
    output_tokens: int


EngineEvent = FirstToken | Finished
