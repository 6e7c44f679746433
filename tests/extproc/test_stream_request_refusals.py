"""Tests of rejected requests, and of unusual requests that are routed: bodies, limits, encodings, empty pools."""

import json

import pytest

from dualmap_extproc.settings import Limits
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    Conversation,
    chat,
    destination,
    pool,
    refused_with,
    request_bodies,
    request_body,
    request_headers,
)
from extproc.stream_requests import every_mode, sent_back


@every_mode
@pytest.mark.parametrize(
    "headers",
    [{"content_length": "12"}, {"content_length": "nonsense"}, {"content_length": "9" * 5000}, {"content_length": "²"}],
)
def test_unusual_content_length_is_ignored(config, headers):
    talk = Conversation()

    answers = talk.send(request_headers(config, **headers), request_body(chat()))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
def test_content_length_above_the_limit_is_rejected_at_once(config):
    talk = Conversation(limits=Limits(body_bytes=1000))

    assert refused_with(talk.send(request_headers(config, content_length="1001"))) == 413
    assert talk.stream.ended


@every_mode
def test_body_above_the_limit_is_rejected(config):
    talk = Conversation(limits=Limits(body_bytes=1000))
    chunks = [b"x" * 1001] if config is BUFFERED else [b"x" * 600, b"x" * 401]

    answers = talk.send(request_headers(config), *request_bodies(chunks, end=False))

    assert refused_with(answers[-1:]) == 413
    assert talk.stream.ended
    assert talk.send(request_body(b"more")) == []


@every_mode
def test_body_of_exactly_the_limit_is_routed(config):
    body = chat()
    talk = Conversation(limits=Limits(body_bytes=len(body)))

    answers = talk.send(request_headers(config, content_length=str(len(body))), request_body(body))

    assert destination(answers[0] if config in (NO_WAIT, DUPLEX) else answers[-1])


@every_mode
def test_body_of_twelve_megabytes_is_routed(config):
    body = chat("long prompt " * 1_000_000)
    assert len(body) > 12_000_000
    step = len(body) if config is BUFFERED else 65_536
    talk = Conversation()

    answers = talk.send(request_headers(config), *request_bodies(body[i : i + step] for i in range(0, len(body), step)))

    assert sum(destination(answer) is not None for answer in answers) == 1
    if config is DUPLEX:
        assert b"".join(piece for piece, _ in sent_back(answers[1:])) == body


@every_mode
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"{}", 400),
        (b'{"model": 7}', 400),
        (b'{"model": ["m"]}', 400),
        (b'{"model": "m", "n": NaN}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"\xef\xbb\xbf" + chat(), 400),
        (b"\x1f\x8b\x08\x00gzip", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (chat(model="unknown"), 404),
    ],
)
def test_invalid_body_is_rejected_with_an_openai_error(config, body, status):
    talk = Conversation()

    answers = talk.send(request_headers(config), request_body(body))

    assert refused_with(answers[-1:]) == status
    assert talk.stream.ended
    assert talk.in_flight == 0


@every_mode
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m"}',
        b'{"model": "m", "model": "m", "messages": []}',
        b'{"model": "m", "prompt": 123456789012345678901234567890}',
        b'{"model": "m", "messages": {"role": "user"}}',
        b'{"model": "m", "messages": [null, 1, "x", [[]], {"content": {"a": [{}]}}]}',
        b'{"model": "m", "messages": [{"role": 1, "content": [1, null, {"type": "text"}]}]}',
        b'{"model": "m", "prompt": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"model": "m", "tools": "none", "cache_salt": 7, "lora_path": {"a": 1}}',
        b'  {"model": "m", "input": ""}  ',
    ],
)
def test_unusual_but_valid_body_is_routed(config, body):
    talk = Conversation()

    answers = talk.send(request_headers(config), request_body(body))

    assert sum(destination(answer) is not None for answer in answers) == 1


@every_mode
def test_post_without_body_is_rejected(config):
    assert refused_with(Conversation().send(request_headers(config, end=True))) == 400


@every_mode
def test_empty_pool_answers_503_and_leaves_no_request_open(config):
    talk = Conversation(pool(members=0))

    assert refused_with(talk.send(request_headers(config), request_body(chat()))[-1:]) == 503
    talk.again()
    assert refused_with(talk.send(request_headers(config, method="GET", end=True))) == 503
    assert talk.in_flight == 0


@every_mode
def test_router_without_pools_answers_404_to_post_and_503_to_get(config):
    talk = Conversation()
    talk.picker.set_pools(1.0, ())

    assert refused_with(talk.send(request_headers(config), request_body(chat()))[-1:]) == 404
    talk.again()
    assert refused_with(talk.send(request_headers(config, method="GET", end=True))) == 503


@every_mode
@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"content_encoding": "gzip"}, "content-encoding gzip is not supported: send the body uncompressed"),
        ({"Content_Encoding": "identity, BR"}, "content-encoding identity, br is not supported"),
        ({"content_encoding": "x" * 5000}, "..."),
        ({"content_type": "Multipart/Form-Data; boundary=x"}, "content-type multipart/form-data is not supported"),
    ],
)
def test_unsupported_body_encoding_is_rejected_at_the_headers(config, headers, said):
    talk = Conversation()

    answers = talk.send(request_headers(config, **headers))

    assert refused_with(answers) == 400
    message = json.loads(answers[0].immediate_response.body)["error"]["message"]
    assert said in message
    assert len(message) < 200
    assert talk.stream.ended
    assert talk.observer.names() == ["refused"]


@every_mode
@pytest.mark.parametrize(
    "headers", [{"content_encoding": "Identity"}, {"content_encoding": ""}, {"content_type": "application/json"}]
)
def test_body_without_content_encoding_is_routed(config, headers):
    talk = Conversation()

    talk.send(request_headers(config, **headers), request_body(chat()))

    assert talk.observer.names() == ["routed"]


def test_body_headers_of_a_bodiless_request_are_ignored():
    talk = Conversation()

    talk.send(request_headers(NO_WAIT, method="GET", end=True, content_encoding="gzip"))

    assert talk.observer.names() == ["routed_bodiless"]


@every_mode
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize(
    ("limits", "headers", "said"),
    [
        (Limits(headers=5), {f"x_{n}": "" for n in range(4)}, "The request has more than 5 headers"),
        (Limits(header_bytes=1000), {"x_long": "x" * 1000}, "The request's headers are larger than 1000 bytes"),
        (Limits(header_bytes=1000), {"x_" + "long" * 250: ""}, "The request's headers are larger than 1000 bytes"),
    ],
    ids=["many", "long value", "long name"],
)
def test_headers_above_the_limits_are_rejected(config, method, limits, headers, said):
    talk = Conversation(limits=limits)

    answers = talk.send(request_headers(config, method=method, end=method == "GET", **headers))

    assert refused_with(answers) == 400
    error = json.loads(answers[0].immediate_response.body)["error"]
    assert (error["code"], error["message"]) == ("headers_too_large", said)
    assert talk.stream.ended
    assert talk.observer.names() == ["refused"]


@every_mode
def test_headers_at_envoys_default_limits_are_accepted(config):
    """By default Envoy accepts 100 headers with a total of 60 KiB."""
    talk = Conversation()
    headers = {f"x_{n}": "v" * 600 for n in range(96)}

    talk.send(request_headers(config, **headers), request_body(chat()))

    assert talk.observer.names() == ["routed"]
