"""Tests of request bodies: the parsed fields, and the rejected field in the error message."""

import pytest

from dualmap_sim.errors import ApiError
from dualmap_sim.openai_api import (
    DEFAULT_COMPLETION_TOKENS,
    DEFAULT_OUTPUT_TOKENS,
    chat_prompt,
    check_model,
    embedding_inputs,
    parse_body,
    read_call,
    text_prompt,
)
from dualmap_sim.tokenizer import encode, unpack

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a": "\\ud800"}'])
def test_body_without_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body)

    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [({"model": "m"}, None), ({}, None), ({"model": None}, None), ({"model": "n"}, 404), ({"model": 3}, 400)],
)
def test_request_for_unknown_model_is_rejected(body: dict[str, object], status: int | None) -> None:
    if status is None:
        check_model(body, "m")
        return
    with pytest.raises(ApiError) as caught:
        check_model(body, "m")
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("limits", "tokens", "reason"),
    [
        ({}, DEFAULT_OUTPUT_TOKENS, "stop"),
        ({"max_tokens": 7}, 7, "length"),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5, "length"),
        ({"min_tokens": 50}, 50, "stop"),
        ({"min_tokens": 2, "max_tokens": 4}, 4, "length"),
        ({"ignore_eos": True, "max_tokens": 3}, 3, "length"),
        ({"ignore_eos": True}, 1000, "length"),
        ({"max_tokens": None, "stream": None}, DEFAULT_OUTPUT_TOKENS, "stop"),
    ],
)
def test_response_length_is_bounded_by_the_request_limits(limits: dict[str, object], tokens: int, reason: str) -> None:
    call = read_call({"messages": HELLO, **limits}, chat=True)

    assert call.output_tokens(room_tokens=1000) == tokens
    assert call.finish_reason == reason


def test_completion_default_length_equals_the_openai_default() -> None:
    call = read_call({"prompt": "x"}, chat=False)

    assert (call.output_tokens(room_tokens=1000), call.finish_reason) == (DEFAULT_COMPLETION_TOKENS, "length")


def test_request_without_room_for_output_in_context_is_rejected() -> None:
    call = read_call({"messages": HELLO, "max_tokens": 11}, chat=True)

    with pytest.raises(ApiError, match=r"max_tokens is 11, .* room for 10 tokens"):
        call.output_tokens(room_tokens=10)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [*HELLO, {"content": "no role"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache_salt": 1}, "cache_salt"),
    ],
)
def test_bad_request_error_contains_the_field(change: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_call({"messages": HELLO, **change}, chat=True)

    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [1, "a"], [-1], [2**32], [True], {}, 5, [[]]])
def test_prompt_is_a_text_or_a_list_of_token_ids(prompt: object) -> None:
    with pytest.raises(ApiError):
        text_prompt({"prompt": prompt}, "prompt")


def test_token_ids_count_as_tokens_and_text_as_4_bytes_per_token() -> None:
    assert unpack(encode(text_prompt({"prompt": [5, 70_000]}, "prompt"))) == [5, 70_000]
    assert unpack(encode(text_prompt({"prompt": [[5, 6]]}, "prompt"))) == [5, 6]
    assert len(unpack(encode(text_prompt({"prompt": ["hello"]}, "prompt")))) == 2
    assert read_call({"prompt": "hello"}, chat=False).prompt_tokens == 2


def test_continued_conversation_extends_its_prompt() -> None:
    before = chat_prompt({"messages": HELLO})
    answer, more = {"role": "assistant", "content": " the fox"}, {"role": "user", "content": "go on"}
    after = chat_prompt({"messages": [*HELLO, answer, more]})

    assert after.startswith(before + b" the fox")


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "system", "content": "hello"}]},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://b"}}]}]},
        {"messages": [{"role": "user", "content": None, "tool_calls": [{"id": "1"}]}]},
    ],
)
def test_prompt_includes_roles_tools_and_images(other: dict[str, object]) -> None:
    others = [chat_prompt({"messages": HELLO}), chat_prompt({"messages": [{"role": "user", "content": None}]})]

    assert chat_prompt(other) not in others


def test_content_text_parts_equal_plain_text() -> None:
    parts = [{"type": "text", "text": "hel"}, "lo"]

    assert chat_prompt({"messages": [{"role": "user", "content": parts}]}) == chat_prompt({"messages": HELLO})


def test_embedding_inputs_are_parsed() -> None:
    assert embedding_inputs({"input": "a"}) == [b"a"]
    assert embedding_inputs({"input": ["a", "b"]}) == [b"a", b"b"]
    assert embedding_inputs({"input": [1]}) == [b"\1\0\0\0"]
    with pytest.raises(ApiError):
        embedding_inputs({"input": ["a", ""]})


def test_chat_that_continues_its_last_message_has_no_further_turn() -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert chat_prompt(body).endswith(b"<|im_start|>assistant\none two")
    with pytest.raises(ApiError, match="add_generation_prompt: false"):
        chat_prompt({**body, "add_generation_prompt": True})
