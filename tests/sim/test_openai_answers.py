"""Tests that response bodies and SSE chunks have the fields of vLLM 0.32's recorded responses."""

import json

import pytest

from dualmap_sim.errors import ApiError
from dualmap_sim.openai_answers import DONE, Answer, error_body, output_text
from shared_data import shared_file


def answer(*, chat: bool = True, output_tokens: int = 4) -> Answer:
    return Answer(
        chat=chat,
        answer_id="id-1",
        created_s=1_795_150_103,
        model='a "quoted" model',
        start=7,
        prompt_tokens=15,
        output_tokens=output_tokens,
        finish_reason="length",
    )


def events(stream: bytes) -> list[dict[str, object]]:
    """Parse SSE events, without the closing [DONE]."""
    texts = [line[len(b"data: ") :] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(text) for text in texts if text != b"[DONE]"]


def whole_stream(reply: Answer) -> bytes:
    chunks = (
        reply.opening_chunk(),
        reply.text_chunk(0, 3),
        reply.text_chunk(3, 4),
        reply.usage_chunk(cached_tokens=0),
        DONE,
    )
    return b"".join(chunks)


def skeleton(value: object) -> object:
    """Return an object's fields in their order, without the values."""
    if isinstance(value, dict):
        return [(key, skeleton(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [skeleton(item) for item in value]
    return None


def test_streamed_chat_response_has_vllm_fields() -> None:
    recorded = events(shared_file("fixtures/vllm/stream_include_usage.http").read_bytes())
    del recorded[-1]["system_fingerprint"]  # this field identifies the vLLM build

    assert skeleton(events(whole_stream(answer()))) == skeleton(recorded)


def test_stream_sends_role_text_finish_reason_and_usage_in_order() -> None:
    opening, first, last, usage = events(whole_stream(answer()))

    assert opening["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    texts = [event["choices"][0]["delta"]["content"] for event in (first, last)]  # type: ignore[index]
    assert "".join(texts).encode() == output_text(7, 4)
    reasons = [event["choices"][0]["finish_reason"] for event in (first, last)]  # type: ignore[index]
    assert reasons == [None, "length"]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 15,
        "total_tokens": 19,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
    }
    assert {event["model"] for event in (opening, first, last, usage)} == {'a "quoted" model'}


def test_streamed_completion_sends_text_without_role_chunk() -> None:
    reply = answer(chat=False)

    assert reply.opening_chunk() == b""
    (chunk,) = events(reply.text_chunk(0, 4))
    assert chunk["object"] == "text_completion"
    assert chunk["choices"][0]["text"].encode() == output_text(7, 4)  # type: ignore[index]


@pytest.mark.parametrize("chat", [True, False])
def test_unstreamed_response_equals_the_stream(chat: bool) -> None:
    whole = json.loads(answer(chat=chat).whole(cached_tokens=8))

    choice = whole["choices"][0]
    assert (choice["message"]["content"] if chat else choice["text"]).encode() == output_text(7, 4)
    assert whole["object"] == ("chat.completion" if chat else "text_completion")
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


def test_response_token_is_four_bytes_at_any_length() -> None:
    text = output_text(29, 100)

    assert len(text) == 400
    assert b"".join(output_text(29 + at, 3) for at in range(0, 99, 3)) == text[: 99 * 4]
    assert json.loads(b'"' + text + b'"') == text.decode()
    assert all(len(word) == 3 for word in text.decode().split())


def test_error_response_has_openai_format() -> None:
    body = json.loads(error_body(ApiError(400, "BadRequestError", "no", param="n")))

    assert body == {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}


def test_chunk_with_usage_counts_the_tokens_so_far() -> None:
    (chunk,) = events(answer().text_chunk(0, 3, with_usage=True))
    assert chunk["usage"] == {"prompt_tokens": 15, "total_tokens": 18, "completion_tokens": 3}
