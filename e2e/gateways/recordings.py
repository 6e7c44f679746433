"""Recordings of the messages that gateways send on ext_proc streams, which unit tests replay.

The requests of a recording are the same for every gateway. ``make gateways`` compares the kinds of messages with the
recording. To replace the recordings, run ``DUALMAP_RECORD_STREAMS=yes make gateways ARGS="-k recorded"``.
"""

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from dualmap_extproc.wire import ext_proc_pb2 as wire
from gateways.site import MODEL, Site
from gateways.tap import Message, Tap
from harness.clients import http1, http2
from harness.upstream import Received, plain, sse
from harness.waiting import until

FOLDER = Path(__file__).parents[2] / "tests" / "extproc" / "recorded" / "gateways"
_EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(3)]
_END = b"data: [DONE]\n\n"
_JSON = {"content-type": "application/json"}
_CHAT = "/v1/chat/completions"
_LARGE_BYTES = 40_000


async def record(site: Site, tap: Tap, *, host: str, port: int) -> list[tuple[str, list[Message]]]:
    """Send the requests of a recording through a gateway; return each request's name and messages."""
    url = f"http://{host}:{port}"
    requests = {
        "get": lambda: http1(f"{url}/v1/models"),
        "chat": lambda: http1(url + _CHAT, body=_chat("hello"), headers=_JSON),
        "chunked": lambda: http1(url + _CHAT, body=_chat("hello"), headers=_JSON, chunk_bytes=16),
        "large": lambda: http1(url + _CHAT, body=_chat("x" * _LARGE_BYTES), headers=_JSON),
        "events": lambda: http1(url + _CHAT, body=_chat("hello", stream=True), headers=_JSON),
        "http2": lambda: http2(port, host=host, path=_CHAT, body=_chat("hello"), headers=_JSON),
        "trailers": lambda: http2(
            port, host=host, path=_CHAT, body=_chat("hello"), headers=_JSON, trailers=[("x-sum", "1")]
        ),
    }
    for engine in site.engines.values():
        engine.answer = _answer
    conversations = []
    for name, send in requests.items():
        before = len(tap.conversations)
        reply = await send()
        assert reply.status == 200, f"{name}: {reply.status} {reply.body[:200]!r}"

        async def seen(expected: int = before + 1) -> bool:
            return len(tap.conversations) == expected

        await until(seen, f"the stream of {name}")
        conversations.append((name, tap.conversations[-1]))
    return conversations


def check_or_write(gateway: str, conversations: Sequence[tuple[str, list[Message]]]) -> None:
    """Compare the kinds of the gateway's messages with its recording, or replace the recording."""
    path = FOLDER / f"{gateway}.json"
    sent = {name: _of_gateway(messages) for name, messages in conversations}
    if os.environ.get("DUALMAP_RECORD_STREAMS"):
        FOLDER.mkdir(exist_ok=True)
        texts = {name: [_encoded(each) for each in messages] for name, messages in sent.items()}
        path.write_text(json.dumps(texts, indent=1) + "\n")
    recorded = json.loads(path.read_text())
    for name, messages in sent.items():
        before = [wire.ProcessingRequest.FromString(base64.b64decode(text)) for text in recorded[name]]
        assert _kinds(messages) == _kinds(before), f"{gateway}, {name}: record the streams again"


def _of_gateway(messages: Sequence[Message]) -> list[wire.ProcessingRequest]:
    return [each for each in messages if isinstance(each, wire.ProcessingRequest)]


def _kinds(messages: Sequence[wire.ProcessingRequest]) -> set[str | None]:
    """Return the kinds of the messages. Their number depends on the network."""
    return {each.WhichOneof("request") for each in messages}


def _encoded(message: wire.ProcessingRequest) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


async def _answer(request: web.Request, received: Received) -> web.StreamResponse:
    if b'"stream": true' in received.body:
        return await sse([*_EVENTS, _END])(request, received)
    return await plain(request, received)
