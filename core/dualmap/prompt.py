"""Request body (parsed JSON) to canonical prompt text."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What of a request body matters to routing. ``text`` is canonical, ``lora`` and ``cache_salt`` may be empty."""

    model: str
    text: bytes
    lora: str = ""
    cache_salt: str = ""


def read_prompt(body: Mapping[str, object]) -> Prompt:
    """Return the prompt of a parsed body; raises BadRequest where it cannot be routed."""
    raise NotImplementedError
