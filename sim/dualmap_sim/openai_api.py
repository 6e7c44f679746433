"""OpenAI request bodies as vLLM reads them: converts JSON into a prompt with limits, or into an error.

A prompt of token ids becomes bytes, four for each id, as ``tokenizer.py`` counts tokens.
``openai_answers.py`` writes the answers, and ``http_server.py`` receives and sends the messages. This module never
waits and uses no sockets.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Final, cast

import orjson

from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap_sim.errors import ApiError
from dualmap_sim.tokenizer import count_tokens

BAD_REQUEST: Final = "BadRequestError"
DEFAULT_OUTPUT_TOKENS: Final = 32
"""Length of the simulated model's chat answer in tokens if the request sets no limit."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""Number of tokens that OpenAI's and vLLM's completions endpoints generate without ``max_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generation, as read from the request body."""

    chat: bool
    prompt: bytes
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool

    @property
    def prompt_tokens(self) -> int:
        """Estimated length of the prompt in tokens, at least 1."""
        return count_tokens(self.prompt)

    def output_tokens(self, *, room_tokens: int) -> int:
        """Return the number of tokens of the answer; ``room_tokens`` is the free context. May raise ApiError.

        The simulated model never ends an answer early: the answer has exactly ``max_tokens``. Without ``max_tokens``
        the answer ends after a fixed length. With ``ignore_eos`` and without ``max_tokens``, the answer fills the
        context, as with a real model.
        """
        if self.max_tokens is None:
            natural = DEFAULT_OUTPUT_TOKENS if self.chat else DEFAULT_COMPLETION_TOKENS
            wanted = room_tokens if self.ignore_eos else min(max(natural, self.min_tokens), room_tokens)
        else:
            wanted = self.max_tokens
        if not 1 <= wanted <= room_tokens:
            raise ApiError(
                400,
                BAD_REQUEST,
                f"max_tokens is {wanted}, the context leaves room for {room_tokens} tokens after the prompt",
                param="max_tokens",
            )
        return wanted

    @property
    def finish_reason(self) -> str:
        """``stop`` if the model ended its answer, ``length`` if a limit ended it."""
        return "stop" if self.max_tokens is None and self.chat and not self.ignore_eos else "length"


def parse_body(body: bytes) -> dict[str, object]:
    """Return a request body as a JSON object; raises ApiError 400 if it is not a JSON object."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, BAD_REQUEST, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, BAD_REQUEST, "the body is not a JSON object")
    return parsed


def check_model(body: Mapping[str, object], served: Sequence[str]) -> None:
    """Raise ApiError 404 if the body names another model. As in vLLM, the model may be missing."""
    model = body.get("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise ApiError(400, BAD_REQUEST, "model is not a string", param="model")
    if model not in served:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", param="model")


def read_call(body: Mapping[str, object], *, chat: bool) -> Call:
    """Read a chat completions (``chat``) or completions body; raises ApiError 400 with the invalid field."""
    _int(body, "n", default=1, low=1, high=1)
    max_tokens = _int(body, "max_completion_tokens", default=0, low=1) if chat else 0
    max_tokens = max_tokens or _int(body, "max_tokens", default=0, low=1)
    min_tokens = _int(body, "min_tokens", default=0, low=0)
    if max_tokens and min_tokens > max_tokens:
        raise ApiError(
            400,
            BAD_REQUEST,
            f"min_tokens is {min_tokens}, more than max_tokens ({max_tokens})",
            param="min_tokens",
        )
    stream = _bool(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(400, BAD_REQUEST, "stream_options is not an object", param="stream_options")
    if options is not None and not stream:
        raise ApiError(
            400, BAD_REQUEST, "stream_options is only for requests with stream: true", param="stream_options"
        )
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ApiError(400, BAD_REQUEST, "cache_salt is not a string", param="cache_salt")
    return Call(
        chat=chat,
        prompt=chat_prompt(body) if chat else text_prompt(body, "prompt"),
        cache_salt=salt or "",
        stream=stream,
        include_usage=options is not None and _bool(options, "include_usage"),
        continuous_usage=options is not None
        and _bool(options, "include_usage")
        and _bool(options, "continuous_usage_stats"),
        max_tokens=max_tokens or None,
        min_tokens=min_tokens,
        ignore_eos=_bool(body, "ignore_eos"),
    )


def chat_prompt(body: Mapping[str, object]) -> bytes:
    """Render messages like a ChatML template, with the tools first; raises ApiError 400."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, BAD_REQUEST, "messages is not a list of at least one message", param="messages")
    parts = []
    tools = body.get("tools")
    if tools:
        parts += [b"<|im_start|>tools\n", orjson.dumps(tools), b"<|im_end|>\n"]
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, BAD_REQUEST, f"{where} is not an object with a role", param=where)
        parts += [b"<|im_start|>", message["role"].encode(), b"\n", _content(message.get("content"), where)]
        if message.get("tool_calls"):
            parts.append(orjson.dumps(message["tool_calls"]))
        parts.append(b"<|im_end|>\n")
    if not _bool(body, "continue_final_message"):
        return b"".join((*parts, b"<|im_start|>assistant\n"))
    if body.get("add_generation_prompt") is not False:
        raise ApiError(400, BAD_REQUEST, "continue_final_message requires add_generation_prompt: false")
    return b"".join(parts).removesuffix(b"<|im_end|>\n")


def text_prompt(body: Mapping[str, object], field: str) -> bytes:
    """Read a prompt: a text, a list of token ids, or a list with one such value; raises ApiError 400."""
    value = body.get(field)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value.encode()
    if isinstance(value, list) and value and all(type(item) is int and 0 <= item < 2**32 for item in value):
        return b"".join(cast(int, item).to_bytes(BYTES_PER_TOKEN, "little") for item in value)
    raise ApiError(400, BAD_REQUEST, f"{field} is not one text or one list of token ids", param=field)


def embedding_inputs(body: Mapping[str, object]) -> list[bytes]:
    """Read the ``input`` of an embeddings body: one prompt or a list of prompts; raises ApiError 400."""
    value = body.get("input")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return [text_prompt({"input": item}, "input") for item in value]
    return [text_prompt(body, "input")]


def _content(content: object, where: str) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, list):
        raise ApiError(400, BAD_REQUEST, f"{where}.content is not text, a list of parts or null", param=where)
    return b"".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, dict):
        text = part.get("text")
        # A digest replaces content other than text: 16 tokens, for an image of any size.
        return text.encode() if isinstance(text, str) else hashlib.sha256(orjson.dumps(part)).hexdigest().encode()
    raise ApiError(400, BAD_REQUEST, f"{where}.content has a part that is not an object", param=where)


def _int(body: Mapping[str, object], field: str, *, default: int, low: int, high: int = 2**31) -> int:
    value = body.get(field)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        accepted = str(low) if low == high else f"an integer from {low} to {high}"
        raise ApiError(400, BAD_REQUEST, f"{field} is {shortened(value)}, accepted is {accepted}", param=field)
    return value


def _bool(body: Mapping[str, object], field: str) -> bool:
    value = body.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ApiError(400, BAD_REQUEST, f"{field} is {shortened(value)}, accepted is true or false", param=field)
    return value
