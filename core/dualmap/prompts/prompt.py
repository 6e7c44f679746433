"""Makes the canonical prompt text of a request body (parsed JSON): the parts that an engine turns into tokens.

Roles, text, tools and image digests are part of the text, in the order chat templates put them (tools first), each
introduced by a control character and its kind; texts that hold such characters are escaped, so that none can pass for
another's structure. The same function reads chat completions, completions, responses, embeddings and reranking bodies:
they differ in which fields they have. Anything that is no prompt content (sampling parameters, metadata) is left out,
since it does not change what is cached.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from dualmap.errors import BadRequest
from dualmap.prompts.blocks import BYTES_PER_TOKEN

# More messages, parts and prompts than any engine takes; each costs a microsecond that delays all other requests.
MAX_PIECES = 100_000
_RECORD = "\x1e"
_UNIT = "\x1f"
# The array type code of unsigned integers of BYTES_PER_TOKEN bytes.
_TOKEN_CODE = next(code for code in "IL" if array(code).itemsize == BYTES_PER_TOKEN)
# LoRA adapters that are named beside the model: SGLang's and TensorRT-LLM's fields. vLLM names them as the model.
_LORA_FIELDS = ("lora_path", "lora_request")
# What names a session, the most telling first: vLLM's own field, then OpenAI's.
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
# What a message, or an item of a responses input, holds beside its role and content.
_TURN_FIELDS = (
    *("name", "reasoning_content", "reasoning", "summary", "tool_calls", "function_call", "tool_call_id"),
    *("arguments", "output", "result", "audio"),
)
# Parts of a message's content that hold text: chat completions say `text`, responses `input_text` and `output_text`.
_TEXT_FIELDS = ("text", "refusal")
# Parts that refer to a medium, by URL or inline data.
_MEDIA_FIELDS = ("image_url", "input_audio", "audio_url", "video_url", "image", "file", "file_id", "file_data")
# Bodies of reranking and scoring.
_PAIR_FIELDS = ("query", "text_1", "documents", "text_2")
# json.dumps with options of its own would build an encoder for every call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What of a request body matters to routing.

    ``text`` is canonical; ``lora`` and ``cache_salt`` may be empty; ``streamed`` says whether the answer is to come
    token by token; ``session`` is the session the body names, empty where it names none.
    """

    model: str
    text: bytes
    lora: str = ""
    cache_salt: str = ""
    streamed: bool = False
    session: str = ""


def read_prompt(body: object) -> Prompt:
    """Return the prompt of a parsed body.

    Raises BadRequest when the body is no object, has no usable ``model``, is nested too deeply to be read, or has more
    than MAX_PIECES messages, parts or prompts. Odd content is taken as it comes: whether it makes sense is the
    engine's to say.
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
            streamed=body.get("stream") is True,
            session=_session(body),
        )
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _session(body: Mapping[str, object]) -> str:
    for name in _SESSION_FIELDS:
        value = body.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _canonical_text(body: Mapping[str, object]) -> bytes:
    for name in ("prompt", "input"):
        tokens = _token_bytes(body.get(name))
        if tokens is not None:
            return tokens
    pieces = list(islice(_pieces(body), MAX_PIECES + 1))
    _check_number(pieces)
    return "".join(pieces).encode("utf-8", "surrogatepass")


def _token_bytes(value: object) -> bytes | None:
    """Encode a prompt of token ids, or a batch of such, as four bytes an id; None when it is something else."""
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], list):
        _check_number(value)
        batch = [_token_bytes(item) for item in value]
        return None if None in batch else b"".join(item for item in batch if item is not None)
    try:
        # One call for what may be millions of ids.
        return array(_TOKEN_CODE, value).tobytes()
    except (TypeError, OverflowError):
        return None


def _pieces(body: Mapping[str, object]) -> Iterator[str]:
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
    yield from _content(prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt)
    for name in (*_PAIR_FIELDS, "suffix"):
        if body.get(name):
            yield f"{_RECORD}{name}{_UNIT}"
            yield from _content(body[name])


def _turn(turn: object) -> Iterator[str]:
    """Yield one message, or one item of a responses input (which may be a tool call or its output)."""
    if not isinstance(turn, Mapping):
        yield _RECORD
        yield from _content(turn)
        return
    role = turn.get("role") or turn.get("type")
    yield f"{_RECORD}{_spelt(role)}{_UNIT}"
    yield from _content(turn.get("content"))
    if len(turn) == 2 and "role" in turn and "content" in turn:
        # As nearly all are: looking for a dozen fields in each takes a fifth of reading a long conversation.
        return
    for name in _TURN_FIELDS:
        value = turn.get(name)
        if value:
            yield f"{_UNIT}{name}{_UNIT}{_spelt(value)}"


def _content(content: object) -> Iterator[str]:
    """Yield a message's content: a text, or parts of text and media."""
    if content is None:
        return
    if isinstance(content, list):
        for part in content:
            yield from _part(part)
    else:
        yield _spelt(content)


def _part(part: object) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield f"{_UNIT}{_spelt(part)}"
        return
    texts = [part[name] for name in _TEXT_FIELDS if isinstance(part.get(name), str)]
    media = [name for name in _MEDIA_FIELDS if part.get(name)]
    yield from map(_spelt, texts)
    for name in media:
        # Images enter by digest: their data may be megabytes and would swamp the token estimate.
        yield f"{_UNIT}{name}{_UNIT}{_digest(part[name])}"
    if not texts and not media:
        yield f"{_UNIT}{_compact(part)}"


def _digest(value: object) -> str:
    """Name a medium by its URL or data, whichever way it is wrapped (``{"url": ...}`` or a bare text)."""
    reference = value.get("url", value) if isinstance(value, Mapping) else value
    text = reference if isinstance(reference, str) else _compact(reference)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _spelt(value: object) -> str:
    """Return a text with the characters that mark structure doubled, as they never stand otherwise; or compact JSON."""
    if not isinstance(value, str):
        return _compact(value)
    if _RECORD in value or _UNIT in value:
        return value.replace(_RECORD, 2 * _RECORD).replace(_UNIT, 2 * _UNIT)
    return value


def _compact(value: object) -> str:
    """Spell any JSON value in one way; keys keep the order sent, as chat templates render them in that order."""
    return "" if value is None else _ENCODER.encode(value)


def _check_number(pieces: Sized) -> None:
    if len(pieces) > MAX_PIECES:
        raise BadRequest(f"the prompt has more than {MAX_PIECES} messages, parts or prompts")
