"""Request body (parsed JSON) to canonical prompt text: what of it an engine turns into the tokens it caches.

Roles, text, tools and image digests are part of the text, in the order chat templates put them (tools first), each
introduced by a control character and its kind so that no text can pass for another's structure. The same function reads
chat completions, completions, responses and embeddings bodies: they differ in which fields they have. Anything that
is no prompt content (sampling parameters, metadata) is left out, since it does not change what is cached.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from dualmap.blocks import BYTES_PER_TOKEN
from dualmap.errors import BadRequest

_RECORD = "\x1e"
_UNIT = "\x1f"
_TOKEN_LIMIT = 1 << (8 * BYTES_PER_TOKEN)
# LoRA adapters that are named beside the model: SGLang's and TensorRT-LLM's fields. vLLM names them as the model.
_LORA_FIELDS = ("lora_path", "lora_request")
# Parts of a message's content that hold text: chat completions say `text`, responses `input_text` and `output_text`.
_TEXT_KEYS = ("text", "refusal")
# Parts that refer to a medium, by URL or inline data.
_MEDIA_KEYS = ("image_url", "input_audio", "audio_url", "video_url", "image", "file", "file_id", "file_data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What of a request body matters to routing. ``text`` is canonical, ``lora`` and ``cache_salt`` may be empty."""

    model: str
    text: bytes
    lora: str = ""
    cache_salt: str = ""


def read_prompt(body: object) -> Prompt:
    """Return the prompt of a parsed body.

    Raises BadRequest when the body is no object, has no usable ``model``, or is nested too deeply to be read. Odd
    content is taken as it comes: whether it makes sense is the engine's to say.
    """
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("the body must name a model: a non-empty text", param="model")
    salt = body.get("cache_salt")
    try:
        return Prompt(
            model=model,
            text=_canonical_text(body),
            lora="".join(_compact(body[name]) for name in _LORA_FIELDS if body.get(name)),
            cache_salt=salt if isinstance(salt, str) else "" if salt is None else _compact(salt),
        )
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _canonical_text(body: Mapping[str, object]) -> bytes:
    for name in ("prompt", "input"):
        tokens = _token_bytes(body.get(name))
        if tokens is not None:
            return tokens
    return "".join(_segments(body)).encode("utf-8", "surrogatepass")


def _token_bytes(value: object) -> bytes | None:
    """Encode a prompt of token ids, or a batch of such, as four bytes an id; None when it is something else."""
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, list):
        batch = [_token_bytes(item) for item in value]
        return None if None in batch else b"".join(item for item in batch if item is not None)
    if not all(isinstance(token, int) and 0 <= token < _TOKEN_LIMIT for token in value):
        return None
    return b"".join(int(token).to_bytes(BYTES_PER_TOKEN, "little") for token in value)


def _segments(body: Mapping[str, object]) -> Iterator[str]:
    """Yield the prompt's pieces in the order chat templates render them."""
    for name in ("tools", "functions"):
        if body.get(name):
            yield f"{_RECORD}{name}{_UNIT}{_compact(body[name])}"
    instructions = body.get("instructions")
    if instructions:
        yield f"{_RECORD}system{_UNIT}"
        yield from _content(instructions)
    for name in ("messages", "input"):
        turns = body.get(name)
        if isinstance(turns, list):
            for turn in turns:
                yield from _turn(turn)
        elif turns is not None:
            yield _RECORD
            yield from _content(turns)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield prompt
    elif prompt is not None:
        yield from _content(prompt)
    suffix = body.get("suffix")
    if isinstance(suffix, str):
        yield f"{_RECORD}suffix{_UNIT}{suffix}"


def _turn(turn: object) -> Iterator[str]:
    """Yield one message, or one item of a responses input (which may be a tool call or its output)."""
    if not isinstance(turn, Mapping):
        yield _RECORD
        yield from _content(turn)
        return
    role = turn.get("role") or turn.get("type")
    yield f"{_RECORD}{role if isinstance(role, str) else _compact(role)}{_UNIT}"
    yield from _content(turn.get("content"))
    for name in (
        "name",
        "reasoning_content",
        "tool_calls",
        "function_call",
        "tool_call_id",
        "arguments",
        "output",
    ):
        value = turn.get(name)
        if value:
            yield f"{_UNIT}{name}{_UNIT}{value if isinstance(value, str) else _compact(value)}"


def _content(content: object) -> Iterator[str]:
    """Yield a message's content: a text, or parts of text and media."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _part(part)
    else:
        yield _compact(content)


def _part(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield f"{_UNIT}{part}"
        return
    if not isinstance(part, Mapping):
        yield f"{_UNIT}{_compact(part)}"
        return
    for key in _TEXT_KEYS:
        if isinstance(part.get(key), str):
            yield part[key]
            return
    media = [key for key in _MEDIA_KEYS if part.get(key)]
    if media:
        # Images enter by digest: their data may be megabytes and would swamp the token estimate.
        for key in media:
            yield f"{_UNIT}{key}{_UNIT}{_digest(part[key])}"
        return
    yield f"{_UNIT}{_compact(part)}"


def _digest(value: object) -> str:
    """Name a medium by its URL or data, whichever way it is wrapped (``{"url": ...}`` or a bare text)."""
    reference = value.get("url", value) if isinstance(value, Mapping) else value
    text = reference if isinstance(reference, str) else _compact(reference)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _compact(value: object) -> str:
    """Spell any JSON value in one way; keys keep the order sent, as chat templates render them in that order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
