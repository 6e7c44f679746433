"""Recordings of the ext_proc streams of gateways, which unit tests replay.

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
_LARGE_BYTES = 150_000
_ONEOF = {"gateway": "request", "picker": "response"}


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
    """Compare the kinds of messages with the recording of this gateway, or replace the recording."""
    path = FOLDER / f"{gateway}.json"
    if os.environ.get("DUALMAP_RECORD_STREAMS"):
        FOLDER.mkdir(exist_ok=True)
        document = [
            {"request": name, "messages": [[_sender(each), _encoded(each)] for each in messages]}
            for name, messages in conversations
        ]
        path.write_text(json.dumps(document, indent=1) + "\n")
    recorded = {each["request"]: each["messages"] for each in json.loads(path.read_text())}
    for name, messages in conversations:
        before = [_decoded(sender, text) for sender, text in recorded[name]]
        assert _kinds(messages) == _kinds(before), f"{gateway}, {name}: record the streams again"


def _kinds(messages: Sequence[Message]) -> set[str]:
    """Return the kinds of the messages. Their number and order depend on the network."""
    return {f"{_sender(each)} {each.WhichOneof(_ONEOF[_sender(each)])}" for each in messages}


def _sender(message: Message) -> str:
    return "gateway" if isinstance(message, wire.ProcessingRequest) else "picker"


def _encoded(message: Message) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _decoded(sender: str, text: str) -> Message:
    kind = wire.ProcessingRequest if sender == "gateway" else wire.ProcessingResponse
    return kind.FromString(base64.b64decode(text))


def _chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


async def _answer(request: web.Request, received: Received) -> web.StreamResponse:
    if b'"stream": true' in received.body:
        return await sse([*_EVENTS, _END])(request, received)
    return await plain(request, received)
