"""Makes the canonical prompt text of a request body (parsed JSON): the parts that an engine turns into tokens.

A table for each API names the fields that count, in the order in which engines render them; docs/prompts.md explains
it. All other fields are left out: they do not change what is cached, and a client must not make a prompt look long by
a field that its engine ignores.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

from dualmap.errors import BadRequest
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.prompts.content import RECORD, UNIT, Conversation, Shape, as_json, compact, digest

# More messages, parts and prompts than any engine takes; each costs a microsecond that delays all other requests.
MAX_PIECES: Final = 100_000
# The longest LoRA adapter and cache salt in characters: every request with one hashes it.
MAX_NAME: Final = 4096
# The array type code of unsigned integers of BYTES_PER_TOKEN bytes.
_TOKEN_CODE: Final = next(code for code in "IL" if array(code).itemsize == BYTES_PER_TOKEN)
# LoRA adapters that are named beside the model: SGLang's and TensorRT-LLM's fields. vLLM names them as the model.
_LORA_FIELDS: Final = ("lora_path", "lora_request")
# What names a session, the most telling first: vLLM's own field, then OpenAI's.
_SESSION_FIELDS: Final = ("session_id", "prompt_cache_key", "user")

_Reader: TypeAlias = Callable[[str, object], Iterator[str]]
"""Yields the pieces of one field, given its name and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fields of an API's bodies that count, in the order in which engines render them.

    ``a.b`` is field b of the object in field a. ``token_ids`` are the fields that may hold a prompt as token ids, which
    is then the whole prompt.
    """

    fields: Mapping[str, _Reader]
    token_ids: tuple[str, ...] = ()


def _digests(name: str, value: object) -> Iterator[str]:
    """Yield a field of any size as a few tokens: it changes what templates render, not in proportion to its length."""
    yield f"{RECORD}{name}{UNIT}{digest(value)}"


def _tools(shape: Shape | None, name: str, value: object) -> Iterator[str]:
    yield f"{RECORD}{name}{UNIT}{as_json(value, shape)}"


def _system(conversation: Conversation, _: str, value: object) -> Iterator[str]:
    return conversation.system(value)


def _turns(conversation: Conversation, _: str, value: object) -> Iterator[str]:
    return conversation.turns(value)


def _prompt(_: str, value: object) -> Iterator[str]:
    """Yield a prompt that no template renders; a list of one text is that text."""
    return _ANY.content(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _texts(name: str, value: object) -> Iterator[str]:
    yield f"{RECORD}{name}{UNIT}"
    yield from _ANY.content(value)


# What chat templates see of a message, by its role: vLLM and SGLang drop the other fields.
_NAME: Final[Shape] = {"name": None}
_CALLS: Final[Shape] = {"id": None, "type": None, "function": {"name": None, "arguments": None}}
_CHAT: Final = Conversation(
    fields=_NAME,
    of_role={
        "assistant": {**_NAME, "reasoning_content": None, "reasoning": None, "tool_calls": _CALLS},
        "tool": {**_NAME, "tool_call_id": None},
        "developer": {**_NAME, "tools": None},
    },
)
_BLOCKS: Final = Conversation(fields={}, blocks=True)
_ITEMS: Final = Conversation(
    fields=dict.fromkeys(("name", "summary", "call_id", "arguments", "output")),
)
# Bodies of an unknown API: whatever any engine may read.
_ANY: Final = Conversation(
    fields=dict.fromkeys(
        (
            *("name", "reasoning_content", "reasoning", "summary", "tool_calls", "function_call", "tool_call_id"),
            *("call_id", "tools", "arguments", "output", "result", "audio"),
        )
    ),
    exact=False,
    blocks=True,
)
_TEMPLATE: Final[Mapping[str, _Reader]] = {"chat_template": _digests, "chat_template_kwargs": _digests}
_FUNCTIONS: Final[Shape] = {"type": None, "function": None, "defer_loading": None}
_NAMED_TOOL: Final[Shape] = dict.fromkeys(("type", "name", "description", "parameters", "defer_loading"))

LAYOUTS: Final[Mapping[Api, Layout]] = {
    Api.CHAT: Layout(
        fields={
            **_TEMPLATE,
            "reasoning_effort": _digests,
            "documents": _digests,
            "input_ids": _digests,
            "kv_transfer_params.prompt_token_ids": _digests,
            "tools": partial(_tools, _FUNCTIONS),
            "messages": partial(_turns, _CHAT),
        }
    ),
    Api.COMPLETIONS: Layout(fields={"prompt_embeds": _digests, "prompt": _prompt}, token_ids=("prompt",)),
    Api.RESPONSES: Layout(
        fields={
            "chat_template_kwargs": _digests,
            "reasoning.effort": _digests,
            # A namespace is a tool that holds others.
            "tools": partial(_tools, {**_NAMED_TOOL, "tools": _NAMED_TOOL}),
            "instructions": partial(_system, _ITEMS),
            "previous_response_id": _digests,
            "previous_response": _digests,
            "previous_input_messages": _digests,
            "input": partial(_turns, _ITEMS),
        }
    ),
    Api.MESSAGES: Layout(
        fields={
            "chat_template_kwargs": _digests,
            "output_config.effort": _digests,
            "kv_transfer_params.prompt_token_ids": _digests,
            "tools": partial(_tools, dict.fromkeys(("type", "name", "description", "input_schema", "defer_loading"))),
            "system": partial(_system, _BLOCKS),
            "messages": partial(_turns, _BLOCKS),
        }
    ),
    Api.EMBEDDINGS: Layout(
        fields={**_TEMPLATE, "messages": partial(_turns, _CHAT), "input": partial(_turns, _ANY)},
        token_ids=("input",),
    ),
    Api.RERANK: Layout(fields={"query": _texts, "documents": _texts}),
    Api.SCORE: Layout(
        fields=dict.fromkeys(("query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2"), _texts)
    ),
    Api.TOKENIZE: Layout(
        fields={
            **_TEMPLATE,
            "tools": partial(_tools, _FUNCTIONS),
            "messages": partial(_turns, _CHAT),
            "prompt": _prompt,
        }
    ),
    Api.UNKNOWN: Layout(
        fields={
            **_TEMPLATE,
            **dict.fromkeys(("reasoning_effort", "reasoning.effort", "output_config.effort"), _digests),
            **dict.fromkeys(("input_ids", "kv_transfer_params.prompt_token_ids", "prompt_embeds"), _digests),
            "tools": partial(_tools, None),
            "functions": partial(_tools, None),
            "system": partial(_system, _ANY),
            "instructions": partial(_system, _ANY),
            **dict.fromkeys(("previous_response_id", "previous_response", "previous_input_messages"), _digests),
            "messages": partial(_turns, _ANY),
            "input": partial(_turns, _ANY),
            "prompt": _prompt,
            **dict.fromkeys(("query", "queries", "text_1", "data_1"), _texts),
            **dict.fromkeys(("documents", "items", "text_2", "data_2", "suffix"), _texts),
        },
        token_ids=("prompt", "input"),
    ),
}
"""Which fields of a request body count, by API. On an unknown path every field counts that some API reads."""
_PATHS: Final = {
    api: [(name, tuple(name.split(".")), read) for name, read in layout.fields.items()]
    for api, layout in LAYOUTS.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What of a request body matters to routing.

    ``text`` is canonical; ``lora`` and ``cache_salt`` may be empty. ``streamed`` is true if the answer is to come token
    by token. ``session`` is the session the body names, empty where it names none.
    """

    model: str
    text: bytes
    lora: str = ""
    cache_salt: str = ""
    streamed: bool = False
    session: str = ""


def read_prompt(body: object, api: Api = Api.UNKNOWN) -> Prompt:
    """Return the prompt of a parsed body that was sent to ``api``.

    Raises BadRequest when the body is no object, has no usable ``model``, is nested too deeply to be read, has more
    than MAX_PIECES messages, parts or prompts, or a LoRA adapter or cache salt above MAX_NAME. Content of an unexpected
    type is read as JSON text: the engine decides whether to reject it.
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
            text=_canonical_text(body, api),
            lora=_name("".join(compact(body[name]) for name in _LORA_FIELDS if body.get(name)), "lora_path"),
            cache_salt=_name(salt if isinstance(salt, str) else compact(salt), "cache_salt"),
            streamed=body.get("stream") is True,
            session=_session(body),
        )
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _name(text: str, param: str) -> str:
    """Return the text; raise BadRequest if it is longer than MAX_NAME."""
    if len(text) > MAX_NAME:
        raise BadRequest(f"{param} is longer than {MAX_NAME} characters", param=param)
    return text


def _session(body: Mapping[str, object]) -> str:
    for name in _SESSION_FIELDS:
        value = body.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _canonical_text(body: Mapping[str, object], api: Api) -> bytes:
    for name in LAYOUTS[api].token_ids:
        tokens = _token_bytes(body.get(name))
        if tokens is not None:
            return tokens
    pieces = list(islice(_pieces(body, api), MAX_PIECES + 1))
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


def _pieces(body: Mapping[str, object], api: Api) -> Iterator[str]:
    """Yield the prompt's pieces in the order of the API's layout."""
    for name, path, read in _PATHS[api]:
        value: object = body
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value:
            yield from read(name, value)


def _check_number(pieces: Sized) -> None:
    if len(pieces) > MAX_PIECES:
        raise BadRequest(f"the prompt has more than {MAX_PIECES} messages, parts or prompts")
