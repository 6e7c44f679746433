"""Builds the canonical prompt text of a request body (parsed JSON) from the fields that engines convert to tokens.

A table for each API lists the relevant fields, in the order in which engines render them (docs/prompts.md). All other
fields are omitted, because they do not change the cached blocks. A client must not be able to make a prompt look longer
with a field that the engine ignores.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from dualmap.errors import BadRequest
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.prompts.cached_counts import is_comparable
from dualmap.prompts.content import RECORD, UNIT, Conversation, Shape, as_json, compact, digest

# The maximum number of messages, parts and prompts, which is more than any engine accepts. Each message or part takes a
# microsecond, which delays all other requests.
MAX_PIECES: Final = 100_000
# The longest LoRA adapter and cache salt in characters: every request with one hashes it.
MAX_NAME: Final = 4096
# The most answers that the router expects of one request. A larger number cannot hide more work of other sources.
SEQUENCES_MAX: Final = 1024
# The array type code of unsigned integers of BYTES_PER_TOKEN bytes.
_TOKEN_CODE: Final = next(code for code in "IL" if array(code).itemsize == BYTES_PER_TOKEN)
# The fields with a LoRA adapter in SGLang and TensorRT-LLM. vLLM has no such field: the adapter is the model name.
_LORA_FIELDS: Final = ("lora_path", "lora_request")
# The fields with which a client names token ids beside its text. An engine that reads such a field computes these ids
# and not the text. vLLM, SGLang and TensorRT-LLM each read some of them, in some of their APIs and releases.
_ID_FIELDS: Final = ("input_ids", "prompt_token_ids", "kv_transfer_params.prompt_token_ids", "prompt_embeds")
# The fields with a session id, in order of precedence: vLLM's field, then OpenAI's fields.
_SESSION_FIELDS: Final = ("session_id", "prompt_cache_key", "user")
# The fields that may contain several prompts: of completions, and of embeddings.
_BATCH_FIELDS: Final = ("prompt", "input")

_Reader: TypeAlias = Callable[[str, object], Iterator[str]]
"""A function that yields the text pieces of one field from its name and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The relevant fields of an API's request bodies, in the order in which engines render them.

    ``a.b`` is the field b of the object in the field a. ``token_ids`` are the fields that may contain token ids; a
    field with token ids is the complete prompt.
    """

    fields: Mapping[str, _Reader]
    token_ids: tuple[str, ...] = ()


def _digests(name: str, value: object) -> Iterator[str]:
    """Yield a field as a digest: its effect on the rendered prompt is not proportional to its length."""
    yield f"{RECORD}{name}{UNIT}{digest(value)}"


def _tools(shape: Shape | None, name: str, value: object) -> Iterator[str]:
    yield f"{RECORD}{name}{UNIT}{as_json(value, shape)}"


def _system(conversation: Conversation, _: str, value: object) -> Iterator[str]:
    return conversation.system(value)


def _turns(conversation: Conversation, _: str, value: object) -> Iterator[str]:
    return conversation.turns(value)


def _prompt(_: str, value: object) -> Iterator[str]:
    """Yield a prompt without a chat template; a list with one text equals this text."""
    return _ANY.content(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _texts(name: str, value: object) -> Iterator[str]:
    yield f"{RECORD}{name}{UNIT}"
    yield from _ANY.content(value)


# The fields of a message that chat templates receive, by role: vLLM and SGLang remove all other fields.
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
# For bodies of an unknown API: all fields that any engine may read.
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
_IDS: Final[Mapping[str, _Reader]] = dict.fromkeys(_ID_FIELDS, _digests)
_FUNCTIONS: Final[Shape] = {"type": None, "function": None, "defer_loading": None}
_NAMED_TOOL: Final[Shape] = dict.fromkeys(("type", "name", "description", "parameters", "defer_loading"))

LAYOUTS: Final[Mapping[Api, Layout]] = {
    Api.CHAT: Layout(
        fields={
            **_TEMPLATE,
            "reasoning_effort": _digests,
            "documents": _digests,
            **_IDS,
            "tools": partial(_tools, _FUNCTIONS),
            "messages": partial(_turns, _CHAT),
        }
    ),
    Api.COMPLETIONS: Layout(fields={**_IDS, "prompt": _prompt}, token_ids=("prompt",)),
    Api.RESPONSES: Layout(
        fields={
            "chat_template_kwargs": _digests,
            "reasoning.effort": _digests,
            **_IDS,
            # A tool of type namespace contains other tools.
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
            **_IDS,
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
            **_IDS,
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
        token_ids=("prompt", "input", "token_ids"),
    ),
}
"""The relevant fields of a request body, by API. For an unknown API, every field that any API reads is relevant."""
_ID_PATHS: Final = [tuple(name.split(".")) for name in _ID_FIELDS]
_ID_KEYS: Final = frozenset(path[0] for path in _ID_PATHS)
_PATHS: Final = {
    api: [(name, tuple(name.split(".")), read) for name, read in layout.fields.items()]
    for api, layout in LAYOUTS.items()
}


class Rendered(NamedTuple):
    """The text that an engine tokenizes, and whether the tokenizer adds its special tokens around the text."""

    text: str
    special: bool


class Prompt(NamedTuple):
    """The content of a request body that routing uses.

    ``text`` is the canonical prompt text; ``lora`` and ``cache_salt`` may be empty. ``lora`` is the JSON text of the
    engine's own field for an adapter, and ``lora_name`` is the adapter's name in it. ``streamed`` is true if the client
    requests a streamed response. ``session`` is the session id in the body, or empty. ``exact`` is true for a prompt of
    token ids, whose tokens are counted and not estimated. ``token_ids`` are the prompt's ids with four little-endian
    bytes each (``dualmap.engines.token_chain``), None if they are not known or the body has several prompts.
    ``sequences`` is the number of answers: the field ``n`` for each prompt of the body.
    ``comparable`` is false if the engine may report other cached tokens than it caches.
    ``names_ids`` is true for a body that names token ids or embeddings beside its text: it depends on the engine what
    the prompt then is. ``has_tools`` is true for a request with tools. ``rendered`` is the text that the engine
    tokenizes, as a reading process rendered it; None if it is not known.
    """

    model: str
    text: bytes
    lora: str = ""
    lora_name: str = ""
    cache_salt: str = ""
    streamed: bool = False
    session: str = ""
    exact: bool = False
    token_ids: bytes | None = None
    sequences: int = 1
    comparable: bool = True
    names_ids: bool = False
    has_tools: bool = False
    rendered: Rendered | None = None


def read_prompt(body: object, api: Api = Api.UNKNOWN) -> Prompt:
    """Return the prompt of a parsed request body for ``api``.

    Raises BadRequest if the body is not an object, has no valid ``model``, or is nested too deeply. Raises BadRequest
    also for more than MAX_PIECES messages, parts or prompts, and for a LoRA adapter or cache salt longer than MAX_NAME.
    Content of an unexpected type is converted to JSON text: the engine decides whether to reject the request.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("the body must have the field model with a non-empty string", param="model")
    _check_report_mode(body.get("vllm_xargs"))
    salt = body.get("cache_salt")
    try:
        # The names come first: a body that is refused for a name takes little time.
        loras = [value for name in _LORA_FIELDS if (value := body.get(name))]
        lora = _name("".join(map(compact, loras)), "lora_path")
        cache_salt = _name(salt if isinstance(salt, str) else compact(salt), "cache_salt")
        text, exact, token_ids = _canonical_text(body, api)
        named = _named_ids(body)
        if exact and named:
            # The other ids come first, as the digests of other APIs do.
            text, token_ids = b"".join(digest(value).encode() for value in named) + text, None
        return Prompt(
            model=model,
            text=text,
            exact=exact,
            token_ids=token_ids,
            lora=lora,
            lora_name=_lora_name(loras),
            cache_salt=cache_salt,
            streamed=body.get("stream") is True,
            session=_session(body),
            sequences=_sequences(body),
            comparable=is_comparable(body),
            names_ids=bool(named),
            has_tools=bool(body.get("tools")),
        )
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _check_report_mode(extra: object) -> None:
    """Raise BadRequest for a request that makes vLLM announce cached blocks again.

    Such a report looks like new blocks to every reader of KV events, and ends some engines.
    """
    if isinstance(extra, dict) and extra.get("kv_cache_report_mode") not in (None, "incremental"):
        raise BadRequest("vllm_xargs.kv_cache_report_mode must be incremental", param="vllm_xargs")


def _name(text: str, param: str) -> str:
    """Return the text; raise BadRequest if it is longer than MAX_NAME."""
    if len(text) > MAX_NAME:
        raise BadRequest(f"{param} is longer than {MAX_NAME} characters", param=param)
    return text


def _lora_name(values: Sequence[object]) -> str:
    """Return the adapter's name in the engines' own fields: SGLang's is a text, and TensorRT-LLM's an object."""
    value = values[0] if len(values) == 1 else None
    if isinstance(value, dict):
        value = value.get("lora_name")
    return value if isinstance(value, str) else ""


def _session(body: Mapping[str, object]) -> str:
    for name in _SESSION_FIELDS:
        value = body.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _sequences(body: Mapping[str, object]) -> int:
    answers, prompts = body.get("n"), 1
    for name in _BATCH_FIELDS:
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            prompts = len(value)
    return min(prompts * (answers if type(answers) is int and answers > 1 else 1), SEQUENCES_MAX)


def _canonical_text(body: Mapping[str, object], api: Api) -> tuple[bytes, bool, bytes | None]:
    """Return the prompt, whether it consists of token ids, and the ids of a single prompt."""
    for name in LAYOUTS[api].token_ids:
        value = body.get(name)
        tokens = _token_bytes(value)
        if tokens is not None:
            is_single = isinstance(value, list) and (len(value) == 1 or not isinstance(value[0], list))
            is_single = is_single and not body.get("truncate_prompt_tokens")
            return tokens, True, tokens if is_single and sys.byteorder == "little" else None
    pieces = list(islice(_pieces(body, api), MAX_PIECES + 1))
    _check_number(pieces)
    return "".join(pieces).encode("utf-8", "surrogatepass"), False, None


def _token_bytes(value: object) -> bytes | None:
    """Encode a prompt of token ids, or a batch of such prompts, as four bytes per id; None for any other value."""
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], list):
        _check_number(value)
        batch = [_token_bytes(item) for item in value]
        return None if None in batch else b"".join(item for item in batch if item is not None)
    try:
        # A single call, because a prompt may have millions of ids.
        return array(_TOKEN_CODE, value).tobytes()
    except (TypeError, OverflowError):
        return None


def _named_ids(body: Mapping[str, object]) -> list[object]:
    """Return the values of the fields with which a body names token ids beside its text."""
    if _ID_KEYS.isdisjoint(body):
        # Nearly all bodies have none of the fields.
        return []
    return [value for path in _ID_PATHS if (value := _value(body, path))]


def _value(body: Mapping[str, object], path: tuple[str, ...]) -> object:
    value: object = body
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _pieces(body: Mapping[str, object], api: Api) -> Iterator[str]:
    """Yield the prompt's pieces in the order of the API's layout."""
    for name, path, read in _PATHS[api]:
        # Nearly all bodies have few of the fields.
        if path[0] in body and (value := _value(body, path)):
            yield from read(name, value)


def _check_number(pieces: Sized) -> None:
    if len(pieces) > MAX_PIECES:
        raise BadRequest(f"the prompt has more than {MAX_PIECES} messages, parts or prompts")
