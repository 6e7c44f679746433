"""Streams whose engine ends before its answer."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dualmap_sidecar.continuation import EVENT_BYTES_MAX, Continuation, Events
from dualmap_sidecar.json_object import JsonObject
from sidecar_site import Answering, Site, prefilled, site, with_status

WORDS = 12
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def counting(
    *, ends_after: int | None = None, how: str = "cut", usage: bool = True, delta: dict[str, Any] | None = None
) -> Answering:
    """Return an engine whose tokens are numbers that continue those of the prompt, one in each chunk, up to ``WORDS``.

    It ends after some tokens: its connection is ``cut``, its stream ends ``clean``, or with an ``error``. ``delta`` is
    part of its last chunk.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        first = prompt.count("#")
        assert not (chat and first) or (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
        last = min(WORDS, first + (body.get("max_tokens") or WORDS))
        options = body.get("stream_options") or {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head = {"id": f"cmpl-{request.headers['X-Request-Id']}-{first}", "created": first, "model": "qwen"}
        prompt_tokens = 5 + first

        async def send(choices: list[dict[str, Any]], tokens: int, *, last: bool = False) -> None:
            counts = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            }
            shown = usage and options.get("include_usage") and (last or options.get("continuous_usage_stats"))
            event = {**head, "choices": choices, **({"usage": counts} if shown else {})}
            # A chunk in two pieces, as a network may cut it.
            raw = b"data: " + json.dumps(event).encode() + b"\n\n"
            await response.write(raw[:20])
            await asyncio.sleep(0)
            await response.write(raw[20:])

        if chat:
            await send([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
        for number in range(first, last):
            if ends_after is not None and number - first == ends_after:
                if delta is not None:
                    await send([{"index": 0, "delta": delta, "finish_reason": None}], number - first)
                await _end(request, response, how)
                return response
            text = f" #{number}"
            reason = "length" if number + 1 == last else None
            piece: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            await send([{"index": 0, **piece, "finish_reason": reason}], number + 1 - first)
        if ends_after is not None and last - first <= ends_after:
            await _end(request, response, how)
            return response
        if usage and options.get("include_usage"):
            await send([], last - first, last=True)
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


async def _end(request: web.BaseRequest, response: web.StreamResponse, how: str) -> None:
    if how == "error":
        await response.write(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n')
    elif how == "cut":
        await response.write(b'data: {"id": "cm')
        await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.close()


async def stream(made: Site, path: str = TEXT, *members: int, **body: Any) -> list[Any]:
    """Send a streamed request; return the payloads of its events, of which the last is [DONE]."""
    prompt = {"messages": [{"role": "user", "content": "count"}]} if path == CHAT else {"prompt": "count"}
    headers = {"x-dualmap-continue": ",".join(made.prefillers[number].endpoint for number in members)}
    headers |= {"X-Request-Id": "r"} | body.pop("headers", {})
    document = {"model": "qwen", "max_tokens": WORDS, "stream": True, **prompt, **body}
    async with made.client.post(f"{made.url}{path}", json=document, headers=headers) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_of(events: list[Any]) -> str:
    """Return the text of a stream, which has one id and one role."""
    assert {event["id"] for event in events} == {"cmpl-r-0"}
    assert {event["created"] for event in events} == {0}
    choices = [choice for event in events for choice in event["choices"]]
    assert sum("role" in choice.get("delta", {}) for choice in choices) <= 1
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


ALL = "".join(f" #{number}" for number in range(WORDS))


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("how", ["cut", "clean", "error"])
@pytest.mark.parametrize("ends_after", [0, 1, 5, WORDS - 1])
async def test_broken_stream_is_continued_without_a_gap(path: str, how: str, ends_after: int) -> None:
    async with site(counting(), engine=counting(ends_after=ends_after, how=how), continue_tokens=100) as made:
        events = await stream(made, path, 0)
        assert text_of(events) == ALL
        assert not [event for event in events if "usage" in event or not event["choices"]]
        assert made.prefillers[0].received[0].json["max_tokens"] == WORDS - ends_after
        assert made.count("dualmap_pd_continued_total", result="continued") == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_usage_counts_the_whole_answer_once(usage: bool) -> None:
    engine = counting(ends_after=5, usage=usage)
    async with site(counting(), engine=engine, continue_tokens=100) as made:
        *events, last = await stream(made, TEXT, 0, stream_options={"include_usage": True})
        assert text_of([*events, last]) == ALL
        assert (last["choices"], last["usage"]) == (
            [],
            {"prompt_tokens": 5, "completion_tokens": WORDS, "total_tokens": 5 + WORDS},
        )
        assert not [event for event in events if "usage" in event]


async def test_member_that_ends_as_well_is_continued_by_the_next() -> None:
    members = (counting(ends_after=3), with_status(503), counting(ends_after=2, how="clean"), counting())
    async with site(*members, engine=counting(ends_after=4), continue_tokens=100) as made:
        assert text_of(await stream(made, TEXT, 0, 1, 2, 3)) == ALL
        assert [len(member.received) for member in made.prefillers] == [1, 1, 1, 1]
        assert made.count("dualmap_pd_continued_total", result="member_failed") == 3


async def test_prefilled_stream_is_continued() -> None:
    async with site(counting(), prefilled, engine=counting(ends_after=4), continue_tokens=100) as made:
        assert (
            text_of(await stream(made, TEXT, 0, headers={"x-prefiller-host-port": made.prefillers[1].endpoint})) == ALL
        )
        received = made.prefillers[0].received[0]
        assert "kv_transfer_params" not in received.json
        assert not [name for name in received.headers if name.lower().startswith(("x-dualmap", "x-prefiller"))]


@pytest.mark.parametrize("include_usage", [True, False])
async def test_stream_that_lacks_only_its_end_gets_it(include_usage: bool) -> None:
    engine = counting(ends_after=WORDS, how="clean")
    async with site(counting(), engine=engine, continue_tokens=100) as made:
        events = await stream(made, TEXT, 0, stream_options={"include_usage": include_usage})
        assert text_of(events) == ALL
        assert [event["usage"]["completion_tokens"] for event in events if "usage" in event] == [WORDS] * include_usage
        assert not made.prefillers[0].received


async def test_stream_without_another_member_ends_with_an_error() -> None:
    async with site(with_status(500), engine=counting(ends_after=4), continue_tokens=100) as made:
        *events, last = await stream(made, TEXT, 0)
        assert len(events) == 4
        assert last["error"]["code"] == "stream_interrupted"
        assert made.count("dualmap_pd_continued_total", result="no_member") == 1


async def test_stream_above_the_bound_ends_with_an_error() -> None:
    async with site(counting(), engine=counting(ends_after=4), continue_tokens=3) as made:
        *_, last = await stream(made, TEXT, 0)
        assert last["error"]["code"] == "stream_interrupted"
        assert not made.prefillers[0].received
        assert made.count("dualmap_pd_continued_total", result="not_possible") == 1


async def test_event_without_an_end_ends_the_engines_stream() -> None:
    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(EVENT_BYTES_MAX // 65_536 + 1):
            await response.write(b"x" * 65_536)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with site(counting(), engine=endless, continue_tokens=100) as made:
        assert len(text_of(await stream(made, TEXT, 0))) == len(ALL)


@pytest.mark.parametrize("delta", [{"tool_calls": [{"index": 0}]}, {"reasoning": "hm"}, {"reasoning_content": "hm"}])
async def test_stream_with_more_than_text_is_not_continued(delta: dict[str, Any]) -> None:
    async with site(counting(), engine=counting(ends_after=4, delta=delta), continue_tokens=100) as made:
        *_, last = await stream(made, CHAT, 0, tools=[{"type": "function"}])
        assert last["error"]["code"] == "stream_interrupted"
        assert not made.prefillers[0].received


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False}, {"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"echo": True}, {"best_of": 2},
        {"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"suffix": "x"}, {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"}, {"structured_outputs": {"json": {}}},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
)  # fmt: skip
def test_answer_that_is_more_than_text_cannot_be_continued(body: dict[str, Any]) -> None:
    document = {"model": "qwen", "prompt": "x", "stream": True, "n": 1, "logprobs": None, **body}
    parsed = JsonObject.parse(json.dumps(document).encode())
    assert Continuation.of(parsed, chat=False, tokens_max=10) is None


@pytest.mark.parametrize("body", [{"logprobs": True}, {"top_logprobs": 2}, {"continue_final_message": True}])
def test_chat_that_is_more_than_text_cannot_be_continued(body: dict[str, Any]) -> None:
    document = {"messages": [{"role": "user", "content": "x"}], "stream": True, **body}
    parsed = JsonObject.parse(json.dumps(document).encode())
    assert Continuation.of(parsed, chat=True, tokens_max=10) is None


async def test_stream_is_cut_without_the_option() -> None:
    async with site(counting(), engine=counting(ends_after=4)) as made:
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream(made, TEXT, 0)
        assert "stream_options" not in made.engine.received[0].json


async def test_member_that_is_not_allowed_does_not_continue() -> None:
    async with site(counting(), engine=counting(ends_after=4), allow=["10.0.0.0/8"], continue_tokens=100) as made:
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream(made, TEXT, 0)
        assert not made.prefillers[0].received


async def test_chat_without_a_limit_is_continued_without_one() -> None:
    async with site(counting(), engine=counting(ends_after=4), continue_tokens=100) as made:
        assert text_of(await stream(made, CHAT, 0, max_tokens=None, min_tokens=6)) == ALL
        assert made.prefillers[0].received[0].json["max_tokens"] is None
        assert made.prefillers[0].received[0].json["min_tokens"] == 2


async def test_client_that_goes_away_ends_the_continued_stream() -> None:
    async def begins(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"id":"x","choices":[{"index":0,"text":" #4","finish_reason":null}]}\n\n')
        await asyncio.Event().wait()
        raise AssertionError

    async with site(begins, engine=counting(ends_after=4), continue_tokens=100) as made:
        asked = asyncio.create_task(stream(made, TEXT, 0))
        await made.prefillers[0].arrived.wait()
        asked.cancel()
        await made.prefillers[0].cancelled.wait()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_stream_is_split_at_empty_lines_of_either_kind(end: bytes, size: int) -> None:
    stream = b"data: a" + end + b": comment" + end + b"data: b" + end + b"data: cut"
    events = Events()
    found = [each for at in range(0, len(stream), size) for each in events.split(stream[at : at + size])]
    assert found == [b"data: a" + end, b": comment" + end, b"data: b" + end]
