"""Reading a large body: which bodies are large, the cheap checks before the parser, and the frames of processes."""

import json

import pytest

from dualmap.prompts.api import Api
from dualmap.prompts.prompt import MAX_NAME, Prompt, Rendered
from dualmap_extproc.errors import Refused, model_not_found
from dualmap_extproc.request import reading
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.reading import (
    INLINE_BYTES,
    INLINE_ELEMENTS,
    MAX_ELEMENTS,
    PREFIX_BYTES,
    Bounds,
    LargeBody,
    decode_body,
    decode_result,
    encode_body,
    encode_result,
    has_more_elements,
    lengths,
    read_large,
    read_small,
)
from extproc.envoy_messages import chat

BOUNDS = {"m": Bounds(body_bytes=16 * 1024 * 1024, tokens=131_072), "s": Bounds(body_bytes=1000, tokens=10)}


def read(body: bytes, api: Api = Api.CHAT) -> Prompt | Refused:
    return read_large(LargeBody(chunks=(body,), api=api, bounds=BOUNDS))


def refused(body: bytes) -> tuple[int, str]:
    result = read(body)
    assert isinstance(result, Refused)
    return result.status, result.message


def numbers(count: int, *, model="m") -> bytes:
    return b'{"model":"%s","messages":[],"tools":[%s]}' % (model.encode(), b",".join([b"1"] * count))


@pytest.mark.parametrize(
    ("body", "large"),
    [
        (chat("x, [{" * 10_000), False),
        (chat("x, [{" * 50_000), True),
        (chat("x, y: " * 50_000), False),
        (chat("x" * INLINE_BYTES), True),
        (numbers(100_000), True),
        (numbers(INLINE_ELEMENTS - 10), False),
        (numbers(4000), False),
        (numbers(9000), True),
        (chat(tools=[[]] * 5000), True),
        (chat(tools=[{"a": {"b": [1]}}] * 700), True),
    ],
    ids=[
        "text",
        "text with brackets",
        "longer text",
        "long text",
        "many numbers",
        "few numbers",
        "tiny",
        "numbers",
        "lists",
        "objects",
    ],
)
def test_body_is_read_at_once_by_its_bytes_and_its_elements(body, large):
    result = read_small(body, Api.CHAT)
    assert result is None if large else result == read_body(body, Api.CHAT)


def test_small_body_that_is_invalid_is_refused_at_once():
    body = b"no JSON" * 5000
    assert read_small(body, Api.CHAT) == read_body(body, Api.CHAT)


@pytest.mark.parametrize(
    ("body", "elements"),
    [
        (b"[1,2,3]", 3),
        (b'{"a":1,"b":[{}]}', 4),
        (b'["a,b,c","[{",1]', 3),
        (b'["\\"a,b,\\\\\\"","c\\\\",1,2]', 4),
        (json.dumps([f'text {n}, "quoted", C:\\path\\, [{n}]' for n in range(50)]).encode(), 50),
    ],
)
def test_elements_are_counted_outside_of_texts(body, elements):
    json.loads(body)
    assert has_more_elements(body, elements - 1)
    assert not has_more_elements(body, elements)


def test_body_with_too_many_elements_is_refused_unparsed(monkeypatch):
    monkeypatch.setattr(reading, "read_body", None)

    status, message = refused(numbers(MAX_ELEMENTS + 131_073))

    assert (status, message) == (400, f"the body has more than {MAX_ELEMENTS + 131_072} JSON elements")


def test_body_with_many_commas_in_its_text_is_read():
    text = "a, " * (5 * 1024 * 1024)
    prompt = read(chat(text))
    assert isinstance(prompt, Prompt)


def test_body_with_the_longest_prompt_of_token_ids_is_read():
    ids = json.dumps({"model": "m", "prompt": [1_000_000 + n for n in range(131_072)]}).encode()
    prompt = read(ids, Api.COMPLETIONS)
    assert isinstance(prompt, Prompt)
    assert len(prompt.text) == 4 * 131_072


@pytest.mark.parametrize("spelled", ['"model"', '"m\\u006fdel"', '"mode\\u006C"', '"model" \n'])
def test_body_for_an_unknown_model_is_refused_unparsed(monkeypatch, spelled):
    monkeypatch.setattr(reading, "read_body", None)
    body = f'{{"tools": [{"1, " * 5000}1], {spelled}: "other"}}'.encode()

    assert refused(body) == (404, model_not_found("other").message)


@pytest.mark.parametrize("spelled", ['"model": "m"', '"m\\u006fdel": "m"', '"model"  :\t"\\u006d"'])
def test_body_that_names_its_model_last_and_others_inside_is_read(spelled):
    body = f'{{"messages": [{{"model": "other", "content": "\\"model\\": \\"x\\""}}], {spelled}}}'.encode()
    prompt = read(body)
    assert isinstance(prompt, Prompt)
    assert prompt.model == "m"


def test_body_with_a_served_name_in_another_place_is_refused():
    body = b'{"model": "other", "tools": [{"model": "m"}]}'
    assert refused(body) == (404, model_not_found("other").message)


def test_body_without_a_model_or_valid_json_is_a_bad_request():
    assert refused(b'{"messages": []}')[0] == 400
    assert refused(b'{"model": "m", ')[0] == 400


def test_prompt_is_cut_to_what_its_pools_engines_compute():
    prompt = read(chat("word " * 100, model="s"))
    assert isinstance(prompt, Prompt)
    assert len(prompt.text) == 40


def test_body_above_its_pools_limit_is_refused_by_the_process():
    assert refused(chat("x" * 1000, model="s")) == (413, "The request body is larger than 1000 bytes")


def test_session_name_that_is_too_long_does_not_come_back():
    prompt = read(chat(session_id="x" * (MAX_NAME + 1)))
    assert isinstance(prompt, Prompt)
    assert prompt.session == ""


def test_ids_of_a_large_prompt_are_kept_as_far_as_its_text():
    body = b'{"model": "s", "prompt": [%s]}' % b",".join([b"7"] * 100)
    prompt = read(body, Api.COMPLETIONS)
    assert isinstance(prompt, Prompt)
    assert prompt.token_ids == prompt.text == b"\7\0\0\0" * 10
    header, _ = lengths((frame := encode_result(prompt))[:PREFIX_BYTES])
    assert decode_result(frame[PREFIX_BYTES:][:header], frame[PREFIX_BYTES + header :]) == prompt


def test_large_body_is_rendered_for_its_pools_tokenizer():
    asked = []

    def render(folder, body, api):
        asked.append((folder, body["model"], api))
        return Rendered("\N{SNOWMAN} text", special=True)

    bounds = {"m": BOUNDS["m"]._replace(tokenizer="/t"), "s": BOUNDS["s"]}
    bodies = (chat("one"), chat("two", model="s"), chat("three", input_ids=[1]), chat(model="other"))
    larges = [LargeBody(chunks=(body,), api=Api.CHAT, bounds=bounds) for body in bodies]
    prompts = [prompt for large in larges if isinstance(prompt := read_large(large, render), Prompt)]

    assert asked == [("/t", "m", Api.CHAT)]
    assert [each.rendered for each in prompts] == [("\N{SNOWMAN} text", True), None, None]


@pytest.mark.parametrize(
    ("text", "decoded"), [("\N{SNOWMAN}", ("\N{SNOWMAN}", False)), ("", ("", False)), ("\ud800", None)]
)
def test_frame_of_a_result_contains_the_rendered_text(text, decoded):
    prompt = read_body(chat(), Api.CHAT)
    assert isinstance(prompt, Prompt)
    frame = encode_result(prompt._replace(rendered=Rendered(text, special=False)))
    header, payload = lengths(frame[:PREFIX_BYTES])
    rest = frame[PREFIX_BYTES:]

    assert len(rest) == header + payload
    assert decode_result(rest[:header], rest[header:]) == prompt._replace(rendered=decoded)


def test_frame_of_a_body_is_decoded_to_the_same_body():
    large = LargeBody(chunks=(chat(),), api=Api.RESPONSES, bounds=BOUNDS)
    begin, (body,) = encode_body(large), large.chunks
    header, payload = lengths(begin[:PREFIX_BYTES])

    assert (header, payload) == (len(begin) - PREFIX_BYTES, len(body))
    assert decode_body(begin[PREFIX_BYTES:], body) == large


@pytest.mark.parametrize(
    "body",
    [
        chat("\N{SNOWMAN}\x00", cache_salt="\N{SNOWMAN}", session_id="s", stream=True, lora_path="l"),
        chat(model="unknown"),
        b"no JSON",
        b'{"model": "m", "prompt": [1, 2, 3]}',
        chat(n=3),
        chat(tools=[{"type": "function"}], input_ids=[1]),
    ],
)
def test_frame_of_a_result_is_decoded_to_the_same_result(body):
    result = read_body(body, Api.CHAT)
    frame = encode_result(result)
    header, payload = lengths(frame[:PREFIX_BYTES])
    rest = frame[PREFIX_BYTES:]

    assert len(rest) == header + payload
    assert decode_result(rest[:header], rest[header:]) == result
