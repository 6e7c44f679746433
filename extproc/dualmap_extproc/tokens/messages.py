"""Prepares the messages and tools of a chat request for a chat template, as vLLM does before it renders the template.

A template receives exactly these values, so each difference from the engine would change the token ids. A request that
these rules do not cover, such as one with an image, raises UnsupportedRequest.
"""

import json
from collections.abc import Mapping
from typing import Final, TypeAlias

Json: TypeAlias = dict[str, object]

# The field with the text of each type of content part that vLLM reads as text.
_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_BILLING_HEADER: Final = "x-anthropic-billing-header"
# The fields of a tool's function that vLLM always renders, with null for a missing one. It drops unknown fields.
_FUNCTION_FIELDS: Final = ("name", "description", "parameters")


class UnsupportedRequest(Exception):
    """A request whose tokens the router cannot compute; the text says why."""


def prepared_messages(messages: object, *, wrap_parts: bool) -> list[Json]:
    """Return the messages for a template. With ``wrap_parts``, the template reads content as a list of parts."""
    if not isinstance(messages, list) or not messages:
        raise UnsupportedRequest("messages is not a list of messages")
    return [_message(each, wrap_parts=wrap_parts) for each in messages]


def prepared_tools(tools: object) -> list[Json] | None:
    """Return the tools for a template: the engine's own keys in its order, and all other keys as the client sent them.

    An empty list counts as no tools.
    """
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnsupportedRequest("tools is not a list")
    return [_tool(each) for each in tools]


def _message(message: object, *, wrap_parts: bool) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnsupportedRequest("a message has no role")
    role = message["role"]
    texts = _texts(message.get("content"))
    if role == "system":
        texts = [kept for each in texts if (kept := _without_billing(each)) is not None]
    # Tools' results are joined also for templates that read parts.
    as_parts = wrap_parts and role != "tool"
    content = [{"type": "text", "text": each} for each in texts] if as_parts else "\n".join(filter(None, texts))
    prepared: Json = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            prepared["tool_calls"] = _tool_calls(message["tool_calls"])
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise UnsupportedRequest("the reasoning of a message is not a text")
            prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            prepared[name] = message[name]
    if role == "developer":
        prepared["tools"] = message.get("tools")
    return prepared


def _without_billing(text: str) -> str | None:
    """Return a system text without the line that Claude Code puts in front; None if nothing is left of the text."""
    return text.partition("\n")[2] or None if text.startswith(_BILLING_HEADER) else text


def _texts(content: object) -> list[str]:
    """Return the texts of a message's content."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UnsupportedRequest("a message's content is neither a text nor a list of parts")
    return [text for part in content if (text := _text(part)) is not None]


def _text(part: object) -> str | None:
    """Return the text of a content part; None for a part that vLLM skips."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise UnsupportedRequest("a content part is neither a text nor an object")
    kind = part.get("type")
    name = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if name is None or part.keys() - {"type", name, "cache_control"}:
        raise UnsupportedRequest("a content part is not plain text")
    text = part.get(name)
    if text is not None and not isinstance(text, str):
        raise UnsupportedRequest("the text of a content part is not a text")
    return text


def _tool_calls(calls: object) -> list[Json]:
    """Return the tool calls with their arguments decoded; arguments that are no JSON object become an empty object."""
    if not isinstance(calls, list):
        raise UnsupportedRequest("tool_calls is not a list")
    prepared = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise UnsupportedRequest("a tool call has no function")
        arguments = function.get("arguments")
        prepared.append({**call, "function": {**function, "arguments": _decoded(arguments)}})
    return prepared


def _decoded(arguments: object) -> object:
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
        except RecursionError:
            raise UnsupportedRequest("the arguments of a tool call are nested too deeply") from None
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: object) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise UnsupportedRequest("a tool has no function")
    deferred = tool.get("defer_loading")
    prepared: Json = {"type": tool.get("type", "function"), "function": _function(function, deferred)}
    if deferred is not None:
        prepared["defer_loading"] = deferred
    return prepared


def _function(function: Mapping[str, object], deferred: object) -> Json:
    ordered: Json = {name: function.get(name) for name in _FUNCTION_FIELDS}
    if function.get("strict") is not None:
        ordered["strict"] = function["strict"]
    own = function.get("defer_loading")
    if own is not None or deferred is not None:
        ordered["defer_loading"] = deferred if own is None else own
    return ordered
