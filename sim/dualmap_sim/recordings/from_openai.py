"""Converts logs of OpenAI-compatible servers to requests of a recording. Texts are hashed, and kept nowhere.

A line is ``{"timestamp": TIME, "request": BODY, "response": BODY}``. A prompt becomes hashes as in a router, so equal
prompts have the hashes of a recording with the same key, if the pool serves the model under the same name and has the
default ``blockTokens``.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Final

from dualmap.errors import BadRequest
from dualmap.keys.sessions import session_key
from dualmap.pools.pool import Prefix
from dualmap.prompts.api import guess_api
from dualmap.prompts.blocks import MAX_BLOCKS, chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt, read_prompt
from dualmap.recordings.values import RecordedOutcome, RecordedRequest
from dualmap_sim.recordings.errors import UnusableLine
from dualmap_sim.recordings.imports import NUMBER_MAX, ROUTER, ImportKey

_EPOCH_S_MAX: Final = 1e11
_CACHE_FIELDS: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")


class OpenAiReader:
    """Reads the lines of a log."""

    def __init__(self, key: ImportKey) -> None:
        self._key = key

    def __call__(self, fields: Mapping[str, object]) -> RecordedRequest:
        """Return the request of a line. Raises UnusableLine."""
        body, response = fields.get("request"), fields.get("response")
        if not isinstance(body, dict):
            # A message never quotes a prompt.
            raise UnusableLine("request", type(body).__name__, "the body of a request as a JSON object")
        if response is not None and not isinstance(response, dict):
            raise UnusableLine("response", type(response).__name__, "the body of the response as a JSON object")
        try:
            prompt = read_prompt(body, guess_api(body))
        except BadRequest as error:
            raise UnusableLine("request", "this body", f"a body that a router accepts: {error}") from error
        return self._request(_time_s(fields.get("timestamp")), prompt, response)

    def _request(self, arrived_s: float, prompt: Prompt, response: Mapping[str, object] | None) -> RecordedRequest:
        root = chain_root(model=prompt.model, lora=prompt.lora, cache_salt=prompt.cache_salt, key=self._key.root_key)
        chain = chain_blocks(
            prompt.text, root=root, block_tokens=Prefix().block_tokens, max_blocks=MAX_BLOCKS, exact=prompt.exact
        )
        usage = response.get("usage") if response is not None else None
        counts = _Usage(usage if isinstance(usage, dict) else {})
        return RecordedRequest(
            arrived_s=arrived_s,
            pool=f"{ROUTER}/{prompt.model}",
            model=prompt.model,
            streamed=prompt.streamed,
            prompt_tokens=chain.tokens,
            block_tokens=chain.block_tokens,
            blocks=self._key.blocks(chain.hashes),
            outcome=_outcome(response),
            exact=prompt.exact,
            adapter=prompt.lora_name,
            sequences=prompt.sequences,
            session=self._key.session(session_key(prompt.session, root)) if prompt.session else None,
            engine_prompt_tokens=counts.prompt_tokens,
            output_tokens=counts.output_tokens,
            cached_tokens=counts.cached_tokens,
            comparable=prompt.comparable,
        )


class _Usage:
    """The counts in the field ``usage`` of a response: of chat and text completions, the Responses or Messages API."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        prompt = _count(fields, "prompt_tokens")
        if prompt is None:
            prompt = _count(fields, "input_tokens")
        cached = None
        for details in (fields.get("prompt_tokens_details"), fields.get("input_tokens_details")):
            if isinstance(details, dict):
                cached = _count(details, "cached_tokens")
        if any(name in fields for name in _CACHE_FIELDS):
            # The Messages API counts cached tokens beside the other ones.
            cached = _count(fields, _CACHE_FIELDS[0]) or 0
            prompt = (prompt or 0) + cached + (_count(fields, _CACHE_FIELDS[1]) or 0)
        output = _count(fields, "completion_tokens")
        self.prompt_tokens = prompt
        self.cached_tokens = cached
        self.output_tokens = _count(fields, "output_tokens") if output is None else output


def _count(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and 0 <= value <= NUMBER_MAX else None


def _outcome(response: Mapping[str, object] | None) -> RecordedOutcome:
    if response is None:
        # No end of the request was reported.
        return RecordedOutcome.CLIENT_GONE
    return RecordedOutcome.ENGINE_ERROR if response.get("error") else RecordedOutcome.OK


def _time_s(value: object) -> float:
    """Return a time as seconds since the epoch. A time without a zone is in UTC."""
    time_s: float | None = None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            time = None
        if time is not None:
            time_s = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        time_s = float(value)
    if time_s is None or not 0 <= time_s <= _EPOCH_S_MAX:
        raise UnusableLine("timestamp", value, "seconds since the epoch, or a time of ISO 8601")
    return time_s
