"""Fuzzes the preparation of chat requests for chat templates, and their rendering. Clients send these requests."""

import json
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

import orjson

from dualmap.prompts.api import Api
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.rendering import CONFIG, PromptTexts
from fuzz import trees
from fuzz.choices import Choices

# The first template reads contents as texts, and the second one reads them as parts.
_TEMPLATES: Final = tuple(
    "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for message in messages %}{{ message.role }}{{ message.reasoning_content }}" + content + "{%- for call in "
    "message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor %}"
    "{%- endfor %}{{ documents | tojson }}{{ reasoning_effort }}{{ enable_thinking }}"
    for content in (
        "{{ message.content }}",
        "{%- for part in message.content %}{{ part.text }}{%- endfor %}",
    )
)
_KEYS: Final = (
    *("model", "messages", "tools", "role", "content", "tool_calls", "function", "name", "arguments", "type", "text"),
    *("reasoning", "reasoning_content", "tool_call_id", "parameters", "strict", "defer_loading", "documents", "task"),
    *("chat_template_kwargs", "add_generation_prompt", "reasoning_effort", "enable_thinking", "refusal", "thinking"),
    *("continue_final_message", "cache_control", "description"),
)
_ROLES: Final = ("user", "assistant", "system", "tool", "developer")


def _texts(template: str) -> PromptTexts:
    with TemporaryDirectory() as folder:
        with open(f"{folder}/{CONFIG}", "w", encoding="utf-8") as config:
            json.dump({"chat_template": template}, config)
        return PromptTexts(folder)


_TEXTS: Final = tuple(map(_texts, _TEMPLATES))


def check(data: bytes) -> None:
    """Check that any request has one text, or that its text is unknown.

    The input is used twice: as the request, and as choices that build a request.
    """
    for body in (data, orjson.dumps(_request(Choices(data)))):
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError:
            continue
        for texts in _TEXTS:
            rendered = _rendered(texts, parsed)
            assert rendered == _rendered(texts, orjson.loads(body)), "the same request has another text"


def mutate(data: bytes, random: Random) -> bytes | None:
    """Mutate a request as JSON; return None if it is not JSON."""
    try:
        return json.dumps(trees.mutate(json.loads(data), random, (*_KEYS, *_ROLES))).encode()
    except (ValueError, RecursionError):
        return None


def _rendered(texts: PromptTexts, body: object) -> str | None:
    try:
        return texts.rendered(body, Api.CHAT).text
    except UnsupportedRequest:
        return None


def _request(choices: Choices) -> dict[str, object]:
    messages = [_message(choices) for _ in range(1 + choices.number() % 4)]
    return {"model": "m", "messages": messages, choices.pick(_KEYS): _value(choices, depth=3)}


def _message(choices: Choices) -> dict[str, object]:
    functions = [{"name": "f", "arguments": _arguments(choices)} for _ in range(choices.number() % 3)]
    calls = [{"type": "function", "function": each} for each in functions]
    message = {"role": choices.pick(_ROLES), "content": _value(choices, depth=2), "tool_calls": calls}
    return {**message, choices.pick(_KEYS): _value(choices, depth=2)}


def _arguments(choices: Choices) -> object:
    """Return any value, or a text of JSON that may be nested more deeply than a parser allows."""
    if choices.flag():
        return _value(choices, depth=2)
    return choices.pick(("[", '{"a":')) * choices.number(size=2) + choices.text()


def _value(choices: Choices, depth: int) -> object:
    match choices.number() % (8 if depth else 4):
        case 0:
            return choices.text()
        case 1:
            return choices.pick((None, True, False, 0, 1.5, -1, ""))
        case 2:
            return choices.number(size=8)
        case 3:
            return choices.pick(_ROLES)
        case 4 | 5:
            return [_value(choices, depth - 1) for _ in range(choices.number() % 4)]
        case _:
            return {choices.pick(_KEYS): _value(choices, depth - 1) for _ in range(choices.number() % 4)}
