import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.errors import BadRequest
from dualmap.prompts.prompt import MAX_PIECES, SEQUENCES_MAX, read_prompt

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def text(**body: Any) -> bytes:
    return read_prompt({"model": "m", **body}).text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_longer_conversation_extends_the_prompt_text() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Hello"},
        user("Bye"),
    ]
    texts = [text(messages=turns[:n], tools=[{"type": "function"}]) for n in range(1, 5)]
    assert all(longer.startswith(shorter) and longer != shorter for shorter, longer in itertools.pairwise(texts))


def test_prompt_text_has_tools_before_messages() -> None:
    with_tools = text(messages=[user("Hi")], tools=[{"type": "function", "function": {"name": "search"}}])
    assert with_tools.index(b"search") < with_tools.index(b"Hi")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [user("Hi")]}, {"messages": [{"role": "system", "content": "Hi"}]}),
        ({"messages": [user("Hi")]}, {"messages": [user("Hi")], "tools": [{"type": "function"}]}),
        ({"messages": [user("a"), user("b")]}, {"messages": [user("ab")]}),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "http://x/1.png"}}])]},
         {"messages": [user([{"type": "image_url", "image_url": {"url": "http://x/2.png"}}])]}),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         {"messages": [{"role": "assistant", "tool_calls": [{"id": "2"}]}]}),
        ({"input": "Hi"}, {"input": "Hi", "instructions": "Be brief."}),
        ({"input": [{"type": "function_call_output", "output": "1"}]},
         {"input": [{"type": "function_call_output", "output": "2"}]}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 4]}),
    ],
)  # fmt: skip
def test_prompts_with_different_tokens_have_different_text(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert text(**one) != text(**other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [user("Hi")]}, {"messages": [user([{"type": "text", "text": "Hi"}])]}),
        ({"messages": [user("Hi")], "temperature": 1, "max_tokens": 5}, {"messages": [user("Hi")], "stream": True}),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "http://x/1.png", "detail": "low"}}])]},
         {"messages": [user([{"type": "image_url", "image_url": "http://x/1.png"}])]}),
    ],
)  # fmt: skip
def test_prompts_with_equal_tokens_have_equal_text(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert text(**one) == text(**other)


@pytest.mark.parametrize(
    "field",
    ["reasoning_content", "reasoning", "tool_calls", "function_call", "tool_call_id", "name", "audio", "arguments"],
)
def test_prompt_text_contains_every_field_of_a_turn(field: str) -> None:
    assert text(messages=[{"role": "assistant", field: "one"}]) != text(messages=[{"role": "assistant", field: "two"}])


def test_prompt_text_contains_text_and_image_of_a_content_part() -> None:
    part = {"type": "text", "text": "What is this?", "image_url": {"url": "http://x/1.png"}}
    other = {**part, "image_url": {"url": "http://x/2.png"}}
    assert text(messages=[user([part])]) != text(messages=[user([other])])


def test_user_text_cannot_imitate_prompt_separators() -> None:
    forged = text(messages=[user("a\x1euser\x1fb")])
    assert forged != text(messages=[user("a"), user("b")])
    assert text(messages=[user("a\x1e")]) != text(messages=[user("a\x1e\x1e")])


def test_prompt_in_a_list_equals_the_plain_prompt() -> None:
    assert text(prompt=["Once"]) == text(prompt="Once")


def test_rerank_and_score_bodies_have_prompt_text() -> None:
    assert text(query="q", documents=["a", "b"]) != text(query="q", documents=["a", "c"])
    assert text(text_1="a", text_2="b")


def test_lora_adapter_fields_of_vllm_and_sglang_are_read() -> None:
    assert read_prompt({"model": "m", "lora_request": {"name": "sql"}}).lora


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lora_path": "sql"}, "sql"),
        ({"lora_request": {"lora_name": "sql", "lora_int_id": 1}}, "sql"),
        ({"lora_path": "sql", "lora_request": {"lora_name": "law"}}, ""),
        ({"lora_path": ["sql"]}, ""),
        ({"lora_request": {"lora_name": 7}}, ""),
        ({}, ""),
    ],
)
def test_prompt_has_the_name_of_its_lora_adapter(fields: dict[str, object], name: str) -> None:
    assert read_prompt({"model": "m", "prompt": "x", **fields}).lora_name == name


@pytest.mark.parametrize("stream", [True, False, None, "yes"])
def test_prompt_stream_flag_is_set_only_by_true(stream: object) -> None:
    assert read_prompt({"model": "m", "stream": stream}).streamed is (stream is True)


@pytest.mark.parametrize(
    ("prompt", "exact"), [([1, 2], True), ([[1], [2]], True), ("text", False), (["text"], False), ([1, "text"], False)]
)
def test_prompt_is_exact_only_if_it_consists_of_token_ids(prompt: object, exact: bool) -> None:
    assert read_prompt({"model": "m", "prompt": prompt}).exact is exact


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * (MAX_PIECES + 1)},
        {"messages": [user([""] * 60_000), user([""] * 60_000)]},
        {"prompt": [[1]] * (MAX_PIECES + 1)},
        {"input": ["x"] * (MAX_PIECES + 1)},
    ],
    ids=["turns", "parts", "batch", "inputs"],
)
def test_prompt_with_too_many_parts_is_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="more than 100000"):
        text(**body)


@pytest.mark.parametrize("field", ["cache_salt", "lora_path", "lora_request"])
def test_prompt_with_too_long_a_salt_or_adapter_is_rejected(field: str) -> None:
    with pytest.raises(BadRequest, match="is longer than 4096 characters"):
        text(prompt="hi", **{field: "x" * 4097})


@pytest.mark.parametrize("field", ["cache_salt", "lora_path"])
def test_prompt_with_too_long_a_name_is_rejected_before_its_text(field: str) -> None:
    with pytest.raises(BadRequest, match="is longer than 4096 characters"):
        text(messages=[{}] * (MAX_PIECES + 1), **{field: "x" * 4097})


def test_prompt_text_is_read_from_each_kind_of_body() -> None:
    assert text(prompt="Once upon") == b"Once upon"
    assert b"Once" in text(input=["Once", "upon"])
    assert b"Hi" in text(input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}])
    assert text(prompt=[1, 2**31]) == (1).to_bytes(4, "little") + (2**31).to_bytes(4, "little")
    assert text(prompt=[[1, 2], [3]]) == b"".join(n.to_bytes(4, "little") for n in (1, 2, 3))
    assert text() == b""


def test_prompt_image_is_replaced_by_its_short_digest() -> None:
    data = "data:image/png;base64," + "A" * 1_000_000
    assert len(text(messages=[user([{"type": "image_url", "image_url": {"url": data}}])])) < 100


def test_prompt_cache_salt_and_lora_adapter_are_read() -> None:
    prompt = read_prompt({"model": "m", "prompt": "x", "cache_salt": "tenant", "lora_path": "sql"})
    assert (prompt.cache_salt, prompt.lora) == ("tenant", '"sql"')
    assert (
        read_prompt({"model": "m", "cache_salt": 7}).cache_salt
        != read_prompt({"model": "m", "cache_salt": 8}).cache_salt
    )


@pytest.mark.parametrize(
    "body", [None, [], "text", 1, {}, {"model": ""}, {"model": 3}, {"model": None}, {"model": ["m"]}]
)
def test_body_that_cannot_be_routed_is_rejected(body: object) -> None:
    with pytest.raises(BadRequest):
        read_prompt(body)


def test_deeply_nested_body_is_rejected() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested too deeply"):
        read_prompt({"model": "m", "messages": [user("x")], "tools": deep})


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "input", "tools", "instructions", "suffix", "cache_salt", "lora_path"]),
        JSON,
    )
)
def test_any_json_object_with_a_model_is_read(body: dict[str, Any]) -> None:
    prompt = read_prompt({"model": "m", **body})
    assert prompt == read_prompt(json.loads(json.dumps({"model": "m", **body})))


def test_prompt_with_lone_unicode_surrogates_is_read() -> None:
    assert text(prompt="\ud800") == "\ud800".encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"messages": [user("Hi")]}, 1),
        ({"messages": [user("Hi")], "n": 64}, 64),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"input": ["a", "b"]}, 2),
        ({"input": [user("Hi"), user("Ho")]}, 1),
        ({"prompt": "a", "n": 10**9}, SEQUENCES_MAX),
        ({"prompt": "a", "n": -1}, 1),
        ({"prompt": "a", "n": True}, 1),
        ({"prompt": "a", "n": 2.5}, 1),
        ({"prompt": "a", "n": "3"}, 1),
    ],
)
def test_request_has_a_sequence_for_each_answer_to_each_prompt(body: dict[str, Any], sequences: int) -> None:
    assert read_prompt({"model": "m", **body}).sequences == sequences
