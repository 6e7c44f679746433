"""Replays recorded ext_proc streams of gateways: Istio, Envoy Gateway, and llm-d-router's Envoy configuration.

Each recording has the messages that the gateway sent to ``dualmap epp`` (``e2e/gateways/recordings.py``). All gateways
send both bodies in the mode FULL_DUPLEX_STREAMED.
"""

import base64
import json
from pathlib import Path

import pytest

from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import Conversation, destination, kinds, pool
from extproc.grpc_routers import running

RECORDED = Path(__file__).parent / "recorded" / "gateways"
STREAMS = [
    pytest.param(messages, id=f"{path.stem}-{name}")
    for path in sorted(RECORDED.glob("*.json"))
    for name, messages in json.loads(path.read_text()).items()
]

every_stream = pytest.mark.parametrize("texts", STREAMS)


def decoded(texts: list[str]) -> list[wire.ProcessingRequest]:
    return [wire.ProcessingRequest.FromString(base64.b64decode(text)) for text in texts]


def replay(messages: list[wire.ProcessingRequest]) -> tuple[Conversation, list[wire.ProcessingResponse]]:
    talk = Conversation(pool(model="scripted"))
    return talk, talk.send(*messages)


@every_stream
def test_recorded_modes_are_full_duplex(texts):
    config = decoded(texts)[0].protocol_config

    assert config.request_body_mode == wire.FULL_DUPLEX_STREAMED
    assert config.response_body_mode == wire.FULL_DUPLEX_STREAMED


@every_stream
def test_stream_answers_every_recorded_part_once_and_in_order(texts):
    messages = decoded(texts)
    talk, answers = replay(messages)

    heard = list(dict.fromkeys(each.WhichOneof("request") for each in messages))
    assert list(dict.fromkeys(kinds(answers))) == heard
    assert destination(answers[0])
    for part in ("request_headers", "request_trailers", "response_headers", "response_trailers"):
        assert kinds(answers).count(part) == heard.count(part)
    assert talk.delivered == []
    talk.close()
    assert talk.in_flight == 0


@every_stream
@pytest.mark.parametrize("part", ["request_body", "response_body"])
def test_recorded_body_goes_back_complete(texts, part):
    messages = decoded(texts)
    _, answers = replay(messages)

    sent = [getattr(each, part) for each in messages if each.WhichOneof("request") == part]
    back = [
        getattr(each, part).response.body_mutation.streamed_response
        for each in answers
        if each.WhichOneof("response") == part
    ]
    assert b"".join(each.body for each in back) == b"".join(each.body for each in sent)
    assert [each.end_of_stream for each in back if each.end_of_stream] == [
        each.end_of_stream for each in sent if each.end_of_stream
    ]
    assert not any(each.end_of_stream for each in back[:-1])


@every_stream
@pytest.mark.usefixtures("transport")
async def test_transport_passes_the_answers_on(texts):
    messages = decoded(texts)
    _, expected = replay(messages)

    async with running() as router:
        router.picker.set_pools(0.0, (pool(model="scripted"),))
        call = router.stream()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        answers = [answer async for answer in call]

    assert kinds(answers) == kinds(expected)
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.request_body == theirs.request_body
        assert ours.response_body == theirs.response_body
