"""Tests of the prompt fields of a request body for each API path: every row of docs/prompts.md."""

import re
from pathlib import Path
from typing import Any

import pytest

from dualmap.errors import BadRequest
from dualmap.prompts.api import PATHS, Api, api_of, guess_api
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap.prompts.prompt import LAYOUTS, read_prompt

PAGE = Path(__file__).parents[2] / "docs" / "prompts.md"
LONG = "long text " * 2000
USER = {"role": "user", "content": "Hi"}
# A body that each API accepts, without any optional field.
BODIES: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": [USER]},
    Api.COMPLETIONS: {"prompt": "Hi"},
    Api.RESPONSES: {"input": "Hi"},
    Api.MESSAGES: {"messages": [USER], "max_tokens": 5},
    Api.EMBEDDINGS: {"input": "Hi"},
    Api.RERANK: {"query": "Hi", "documents": ["a", "b"]},
    Api.SCORE: {"text_1": "Hi", "text_2": "you"},
    Api.TOKENIZE: {"prompt": "Hi"},
}
TEXTS = ("one text that is longer than a block of tokens", "another text, as long as that, but not equal to it")
TOOL = [{"type": "function", "function": {"name": text}, "name": text} for text in TEXTS]
# Two values for each field with a type other than text.
VALUES: dict[str, tuple[Any, Any]] = {
    "tools": ([TOOL[0]], [TOOL[1]]),
    "functions": ([TOOL[0]], [TOOL[1]]),
    "messages": ([{"role": "user", "content": TEXTS[0]}], [{"role": "user", "content": TEXTS[1]}]),
    "documents": ([TEXTS[0]], [TEXTS[1]]),
    "chat_template_kwargs": ({"enable_thinking": True}, {"enable_thinking": False}),
    "input_ids": ([1, 2, 3], [1, 2, 4]),
    "prompt_token_ids": ([1, 2, 3], [1, 2, 4]),
    "kv_transfer_params": ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 3]}),
    "reasoning": ({"effort": "low"}, {"effort": "high"}),
    "output_config": ({"effort": "low"}, {"effort": "high"}),
}
# Fields with prompt text for at least one API path.
ALL_FIELDS = sorted({name.partition(".")[0] for layout in LAYOUTS.values() for name in layout.fields})


def key_and_tokens(api: Api, body: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    chain = chain_blocks(read_prompt({"model": "m", **body}, api).text, root=chain_root(model="m"), block_tokens=8)
    return chain.hashes, chain.tokens


def counts(api: Api) -> set[str]:
    return {name.partition(".")[0] for name in LAYOUTS[api].fields}


@pytest.mark.parametrize(("api", "field"), [(api, field) for api in BODIES for field in sorted(counts(api))])
def test_prompt_field_changes_key_and_token_count(api: Api, field: str) -> None:
    one, other = VALUES.get(field, TEXTS)
    bare = {name: value for name, value in BODIES[api].items() if name != field}
    keys = [key_and_tokens(api, {**bare, field: value}) for value in (one, other)]

    assert keys[0][0] != keys[1][0]
    assert all(tokens > key_and_tokens(api, bare)[1] for _, tokens in keys)


@pytest.mark.parametrize(
    ("api", "field"), [(api, field) for api in BODIES for field in ALL_FIELDS if field not in counts(api)]
)
@pytest.mark.parametrize("value", [LONG, [LONG], list(range(1000))], ids=["text", "texts", "ids"])
def test_field_outside_the_prompt_changes_no_key_or_token_count(api: Api, field: str, value: Any) -> None:
    assert key_and_tokens(api, {**BODIES[api], field: value}) == key_and_tokens(api, BODIES[api])


@pytest.mark.parametrize(
    ("api", "field", "value"),
    [
        (Api.CHAT, "chat_template", LONG),
        (Api.CHAT, "chat_template_kwargs", {"x": LONG}),
        (Api.CHAT, "reasoning_effort", LONG),
        (Api.CHAT, "documents", [{"text": LONG}]),
        (Api.CHAT, "input_ids", list(range(10_000))),
        (Api.CHAT, "kv_transfer_params", {"prompt_token_ids": list(range(10_000))}),
        *((api, "prompt_token_ids", list(range(10_000))) for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES)),
        (Api.COMPLETIONS, "prompt_embeds", LONG),
        (Api.RESPONSES, "previous_response_id", LONG),
        (Api.RESPONSES, "previous_input_messages", [{"role": "user", "content": LONG}]),
        (Api.MESSAGES, "output_config", {"effort": LONG}),
    ],
)
def test_setting_field_adds_under_30_tokens_at_any_size(api: Api, field: str, value: Any) -> None:
    body = {**BODIES[api], field: value}
    assert 0 < key_and_tokens(api, body)[1] - key_and_tokens(api, BODIES[api])[1] < 30


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": [{**USER, "arguments": LONG}]}),
        (Api.CHAT, {"messages": [{**USER, "tool_calls": [{"function": {"arguments": LONG}}]}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "refusal": LONG}]}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "note": LONG}]}]}),
        (Api.CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "note": LONG}]}]}),
        (Api.CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}, "note": LONG}]}),
        (Api.RESPONSES, {"input": [{"type": "message", "role": "user", "content": "Hi", "result": LONG}]}),
        (Api.RESPONSES, {"input": "Hi", "tools": [{"type": "namespace", "tools": [{"name": "t", "note": LONG}]}]}),
        (Api.MESSAGES, {"messages": [{**USER, "tool_calls": LONG}]}),
        (Api.MESSAGES, {"messages": [USER], "tools": [{"name": "t", "cache_control": LONG}]}),
        (Api.MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": LONG}]}]}),
    ],
)
def test_nested_values_ignored_by_engines_add_no_tokens(api: Api, body: dict[str, Any]) -> None:
    assert key_and_tokens(api, body)[1] < 30


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_chat_body_token_ids_do_not_replace_the_messages(field: str) -> None:
    body = {"model": "m", "messages": [USER], field: [1, 2, 3]}
    assert read_prompt(body, Api.CHAT).text == read_prompt({"model": "m", "messages": [USER]}, Api.CHAT).text


@pytest.mark.parametrize(
    ("api", "field"), [(Api.COMPLETIONS, "prompt"), (Api.EMBEDDINGS, "input"), (Api.UNKNOWN, "prompt")]
)
def test_token_ids_are_the_prompt_if_the_api_accepts_them(api: Api, field: str) -> None:
    assert read_prompt({"model": "m", field: [1, 2, 3]}, api).text == b"\1\0\0\0\2\0\0\0\3\0\0\0"


IDS_BESIDE = (
    {"input_ids": [1, 2]},
    {"prompt_token_ids": [1, 2]},
    {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
    {"prompt_embeds": "AAAA"},
)


@pytest.mark.parametrize("named", IDS_BESIDE)
@pytest.mark.parametrize("api", BODIES)
def test_ids_beside_a_prompt_are_reported(api: Api, named: dict[str, Any]) -> None:
    assert read_prompt({"model": "m", **BODIES[api], **named}, api).names_ids
    assert not read_prompt({"model": "m", **BODIES[api]}, api).names_ids


@pytest.mark.parametrize("named", IDS_BESIDE)
def test_ids_beside_a_prompt_of_ids_change_its_key_and_are_not_used(named: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": [1, 2, 3]}
    plain, beside = (read_prompt(each, Api.COMPLETIONS) for each in (body, {**body, **named}))
    assert plain.token_ids == plain.text
    assert (beside.token_ids, beside.exact) == (None, True)
    assert beside.text != plain.text
    assert beside.text.endswith(plain.text)
    assert len(beside.text) <= len(plain.text) + 32


def test_ids_that_the_engine_truncates_are_not_used() -> None:
    body = {"model": "m", "prompt": [1, 2, 3], "truncate_prompt_tokens": 1}
    assert read_prompt(body, Api.COMPLETIONS).token_ids is None


def test_ids_of_an_unknown_api_are_the_prompt() -> None:
    assert read_prompt({"model": "m", "token_ids": [1, 2]}).token_ids == b"\1\0\0\0\2\0\0\0"


@pytest.mark.parametrize(("tools", "has_tools"), [(TOOL, True), ([], False), (None, False)])
def test_request_with_tools_is_reported(tools: object, has_tools: bool) -> None:
    assert read_prompt({"model": "m", "messages": [USER], "tools": tools}, Api.CHAT).has_tools is has_tools


@pytest.mark.parametrize(
    ("role", "field", "values"),
    [
        ("user", "name", TEXTS),
        ("assistant", "reasoning", TEXTS),
        ("assistant", "reasoning_content", TEXTS),
        ("assistant", "tool_calls", ([{"id": "1"}], [{"id": "2"}])),
        ("assistant", "tool_calls", ([{"function": {"name": "a"}}], [{"function": {"name": "b"}}])),
        ("assistant", "tool_calls", ([{"function": {"arguments": "a"}}], [{"function": {"arguments": "b"}}])),
        ("tool", "tool_call_id", TEXTS),
        ("developer", "tools", VALUES["tools"]),
    ],
)
def test_chat_message_fields_all_change_the_key(role: str, field: str, values: tuple[Any, Any]) -> None:
    one, other = (key_and_tokens(Api.CHAT, {"messages": [{"role": role, field: value}]}) for value in values)
    assert one[0] != other[0]


@pytest.mark.parametrize(
    ("api", "field"),
    [
        *((api, field) for api in (Api.CHAT, Api.TOKENIZE) for field in ("type", "function", "defer_loading")),
        *((Api.RESPONSES, field) for field in ("type", "name", "description", "parameters", "defer_loading")),
        *((Api.MESSAGES, field) for field in ("type", "name", "description", "input_schema", "defer_loading")),
    ],
)
def test_tool_definition_fields_all_change_the_key(api: Api, field: str) -> None:
    one, other = (key_and_tokens(api, {**BODIES[api], "tools": [{field: text}]}) for text in TEXTS)
    assert one[0] != other[0]


def test_responses_namespace_tools_change_the_key() -> None:
    tools = [[{"type": "namespace", "name": "n", "tools": [{"name": text}]}] for text in TEXTS]
    one, other = (key_and_tokens(Api.RESPONSES, {"input": "Hi", "tools": each}) for each in tools)
    assert one[0] != other[0]


@pytest.mark.parametrize("field", ["name", "call_id", "summary", "arguments", "output"])
def test_responses_item_fields_all_change_the_key(field: str) -> None:
    one, other = (key_and_tokens(Api.RESPONSES, {"input": [{"type": "x", field: text}]}) for text in TEXTS)
    assert one[0] != other[0]


def blocks(text: str) -> list[dict[str, Any]]:
    image = {"type": "image", "source": {"type": "base64", "data": text}}
    return [
        {"type": "text", "text": text},
        {"type": "thinking", "thinking": text, "signature": "s"},
        image,
        {"type": "tool_use", "id": text, "name": "n", "input": {}},
        {"type": "tool_use", "id": "i", "name": text, "input": {}},
        {"type": "tool_use", "id": "i", "name": "n", "input": {"x": text}},
        {"type": "tool_result", "tool_use_id": text, "content": "x"},
        {"type": "tool_result", "tool_use_id": "i", "content": text},
        {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": text}]},
        {"type": "tool_result", "tool_use_id": "i", "content": [image]},
        {"type": "of another kind", "x": text},
    ]


@pytest.mark.parametrize(("one", "other"), list(zip(*map(blocks, TEXTS), strict=True)))
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_anthropic_content_blocks_all_change_the_key(one: dict[str, Any], other: dict[str, Any], role: str) -> None:
    keys = [key_and_tokens(Api.MESSAGES, {"messages": [{"role": role, "content": [each]}]})[0] for each in (one, other)]
    assert keys[0] != keys[1]


def test_anthropic_system_prompts_have_distinct_keys() -> None:
    body = BODIES[Api.MESSAGES]
    keys = {key_and_tokens(Api.MESSAGES, {**body, "system": text})[0][0] for text in TEXTS}
    assert len(keys) == 2
    as_blocks = {**body, "system": [{"type": "text", "text": TEXTS[0], "cache_control": {"type": "ephemeral"}}]}
    assert key_and_tokens(Api.MESSAGES, as_blocks) == key_and_tokens(Api.MESSAGES, {**body, "system": TEXTS[0]})


def test_claude_code_billing_block_does_not_change_the_key() -> None:
    text = {"type": "text", "text": "Be brief."}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3;"}
    bodies = [{**BODIES[Api.MESSAGES], "system": system} for system in ([text], [billing, text])]
    assert key_and_tokens(Api.MESSAGES, bodies[0]) == key_and_tokens(Api.MESSAGES, bodies[1])


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (
            Api.CHAT,
            {
                "tools": [{"type": "function", "function": {}}],
                "messages": [{"role": "assistant", "name": "a", "tool_calls": [{"id": "1"}]}],
            },
        ),
        (Api.CHAT, {"chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "messages": [USER]}),
        (
            Api.RESPONSES,
            {"instructions": "Hi", "input": [{"type": "x", "summary": "s", "call_id": "1", "output": "o"}]},
        ),
        (Api.MESSAGES, {"system": "Hi", "messages": [{"role": "assistant", "content": blocks("x")[:10]}]}),
        *((api, body) for api, body in BODIES.items() if api is not Api.SCORE),
    ],
)
def test_valid_body_on_an_unknown_path_gives_the_same_prompt(api: Api, body: dict[str, Any]) -> None:
    assert read_prompt({"model": "m", **body}, api).text == read_prompt({"model": "m", **body}).text


@pytest.mark.parametrize("field", ALL_FIELDS)
def test_body_fields_on_an_unknown_path_all_change_the_key(field: str) -> None:
    one, other = (key_and_tokens(Api.UNKNOWN, {field: value}) for value in VALUES.get(field, TEXTS))
    assert one[0] != other[0]


@pytest.mark.parametrize(
    ("path", "api"),
    [
        *((f"/v1{end}", api) for end, api in PATHS.items()),
        ("/v1/chat/completions?x=/v1/completions", Api.CHAT),
        ("/v1/chat/completions/", Api.CHAT),
        ("/v1/chat/completions/render", Api.CHAT),
        ("/team/openai/v1/completions", Api.COMPLETIONS),
        ("/rerank", Api.RERANK),
        ("/v1/chat/completions/x", Api.UNKNOWN),
        ("/generate", Api.UNKNOWN),
        ("", Api.UNKNOWN),
    ],
)
def test_request_path_selects_the_api(path: str, api: Api) -> None:
    assert api_of(path) is api


def test_api_page_lists_every_path_and_field_in_order() -> None:
    rows = re.findall(r"^\| (`/.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {path: re.findall("`(.*?)`", fields) for paths, fields in rows for path in re.findall("`(.*?)`", paths)}
    assert listed == {path: list(LAYOUTS[api].fields) for path, api in PATHS.items()}


@pytest.mark.parametrize(
    ("body", "api"),
    [
        *((body, api) for api, body in BODIES.items() if api not in (Api.MESSAGES, Api.EMBEDDINGS, Api.TOKENIZE)),
        ({"messages": [USER], "tools": [{"type": "function", "function": {}}], "prompt": "Hi"}, Api.CHAT),
        ({"messages": [USER], "tools": "none"}, Api.CHAT),
        ({"messages": [USER], "system": "Be brief."}, Api.MESSAGES),
        ({"messages": [USER], "tools": [{"name": "t", "input_schema": {}}]}, Api.MESSAGES),
        ({"input": [1, 2, 3]}, Api.EMBEDDINGS),
        ({"input": ["a", "b"]}, Api.EMBEDDINGS),
        ({"input": [USER]}, Api.RESPONSES),
        *(({name: ["a"]}, Api.SCORE) for name in ("queries", "items", "text_1", "text_2", "data_1", "data_2")),
        ({"query": "Hi"}, Api.UNKNOWN),
        ({}, Api.UNKNOWN),
        ("a text", Api.UNKNOWN),
    ],
)
def test_api_of_a_body_without_path_is_guessed_from_its_fields(body: Any, api: Api) -> None:
    assert guess_api(body) is api


@pytest.mark.parametrize("mode", ["full", "", 1])
def test_prompt_refuses_requests_for_a_full_report(mode: object) -> None:
    with pytest.raises(BadRequest, match="kv_cache_report_mode"):
        read_prompt({"model": "m", "prompt": "a", "vllm_xargs": {"kv_cache_report_mode": mode}})


@pytest.mark.parametrize("extra", [None, {}, [], {"kv_cache_report_mode": "incremental"}, {"other": 1}])
def test_prompt_accepts_other_extra_arguments(extra: object) -> None:
    assert read_prompt({"model": "m", "prompt": "a", "vllm_xargs": extra}).text == b"a"
