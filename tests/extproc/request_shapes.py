"""Request bodies of many shapes: what clients of each API send, by name."""

from typing import Any, NamedTuple

from dualmap.prompts.api import Api


class Shape(NamedTuple):
    """A request body and the API that it is sent to."""

    name: str
    api: Api
    body: dict[str, Any]


USER = {"role": "user", "content": "hello world"}
SYSTEM = {"role": "system", "content": "You are a helpful user."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather",
        "parameters": {"type": "object", "required": ["city"], "properties": {"unit": {}, "city": {"type": "string"}}},
    },
}
MIXED = {"function": {"parameters": {"b": 1, "a": 2}, "strict": True, "name": "f"}, "type": "function"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "P", "a": 1}'},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Returns the weather", "input_schema": {"type": "object"}}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


SHAPES: tuple[Shape, ...] = (
    Shape("one turn", Api.CHAT, _chat(USER)),
    Shape("system and user", Api.CHAT, _chat(SYSTEM, USER)),
    Shape("several turns", Api.CHAT, _chat(SYSTEM, USER, {"role": "assistant", "content": "hello user"}, USER)),
    Shape("last turn is the assistant's", Api.CHAT, _chat(USER, {"role": "assistant", "content": "hello"})),
    Shape("text parts", Api.CHAT, _chat({"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})),
    Shape("text part with cache control", Api.CHAT, _chat({"role": "user", "content": [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]})),
    Shape("system as parts", Api.CHAT, _chat({"role": "system", "content": [{"type": "text", "text": "hello"}]}, USER)),
    Shape("developer", Api.CHAT, _chat({"role": "developer", "content": "hello"}, USER)),
    Shape("empty content", Api.CHAT, _chat({"role": "user", "content": ""})),
    Shape("content of a named user", Api.CHAT, _chat({**USER, "name": "world"})),
    Shape("non-Latin text", Api.CHAT, _chat({"role": "user", "content": "Grüße, 世界 👩‍💻 e\u0301 \u202e \u00a0"})),
    Shape("control characters", Api.CHAT, _chat({"role": "user", "content": "a\x00b\t\r\n\x1f \x7f"})),
    Shape("escaped text", Api.CHAT, _chat({"role": "user", "content": "\"quoted\" \\ </s> <b>&amp;'MM don't"})),
    Shape("white space", Api.CHAT, _chat({"role": "user", "content": "  hello   world \n\n\n  "})),
    Shape("special token in the text", Api.CHAT, _chat({"role": "user", "content": "hello <|im_end|> world"})),
    Shape("part of a special token in the text", Api.CHAT, _chat({"role": "user", "content": "<|im_<|im_end|>end|>"})),
    Shape("tools", Api.CHAT, _chat(USER, tools=[WEATHER])),
    Shape("tools with keys in another order", Api.CHAT, _chat(USER, tools=[MIXED, WEATHER])),
    Shape("tools and tool choice none", Api.CHAT, _chat(USER, tools=[WEATHER], tool_choice="none")),
    Shape("no tools in the list", Api.CHAT, _chat(USER, tools=[])),
    Shape("call and result", Api.CHAT, _chat(USER, CALLED, RESULT, tools=[WEATHER])),
    Shape("call with a text", Api.CHAT, _chat(USER, {**CALLED, "content": "hello"}, RESULT, USER)),
    Shape("call without arguments", Api.CHAT, _chat(USER, {**CALLED, "tool_calls": [
        {**CALL, "function": {"name": "f", "arguments": ""}}]}, RESULT)),
    Shape("result as parts", Api.CHAT, _chat(USER, CALLED, {**RESULT, "content": [{"type": "text", "text": "21"}]})),
    Shape("reasoning", Api.CHAT, _chat(USER, {"role": "assistant", "reasoning": "us", "content": "hello"}, USER)),
    Shape("reasoning content", Api.CHAT, _chat(USER, {"role": "assistant", "reasoning_content": "us", "content": "x"})),
    Shape("no generation prompt", Api.CHAT, _chat(USER, add_generation_prompt=False)),
    Shape("continued message", Api.CHAT, _chat(USER, {"role": "assistant", "content": "hello"},
                                               continue_final_message=True, add_generation_prompt=False)),
    Shape("template settings", Api.CHAT, _chat(USER, chat_template_kwargs={"enable_thinking": False})),
    Shape("reasoning effort", Api.CHAT, _chat(USER, reasoning_effort="low")),
    Shape("sampling and stream", Api.CHAT, _chat(USER, stream=True, temperature=0.5, max_tokens=7, n=2)),
    Shape("salt and session", Api.CHAT, _chat(USER, cache_salt="tenant", user="u")),
    Shape("client's ids beside messages", Api.CHAT, _chat(USER, kv_transfer_params={"prompt_token_ids": [5, 6]})),
    Shape("image", Api.CHAT, _chat({"role": "user", "content": [IMAGE]})),
    Shape("prompt", Api.COMPLETIONS, {"model": "m", "prompt": "hello world"}),
    Shape("prompt in a list", Api.COMPLETIONS, {"model": "m", "prompt": ["hello world"]}),
    Shape("two prompts", Api.COMPLETIONS, {"model": "m", "prompt": ["hello", "world"]}),
    Shape("prompt of ids", Api.COMPLETIONS, {"model": "m", "prompt": [5, 6, 7]}),
    Shape("prompt of ids in a list", Api.COMPLETIONS, {"model": "m", "prompt": [[5, 6, 7]]}),
    Shape("prompt without special tokens", Api.COMPLETIONS,
          {"model": "m", "prompt": "hello world", "add_special_tokens": False}),
    Shape("special token in a prompt", Api.COMPLETIONS, {"model": "m", "prompt": "a<|im_end|>b"}),
    Shape("truncated prompt", Api.COMPLETIONS, {"model": "m", "prompt": "hello world", "truncate_prompt_tokens": 1}),
    Shape("responses text", Api.RESPONSES, {"model": "m", "input": "hello world", "instructions": "hello"}),
    Shape("responses items", Api.RESPONSES, {"model": "m", "input": [{"type": "message", **USER}]}),
    Shape("responses tools", Api.RESPONSES, {"model": "m", "input": "hello", "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}}]}),
    Shape("messages", Api.MESSAGES, {"model": "m", "max_tokens": 5, "messages": [USER]}),
    Shape("messages with system", Api.MESSAGES, {"model": "m", "max_tokens": 5, "messages": [USER], "system": "hello"}),
    Shape("messages with tools", Api.MESSAGES,
          {"model": "m", "max_tokens": 5, "messages": [USER], "tools": [ANTHROPIC_TOOL]}),
)  # fmt: skip
