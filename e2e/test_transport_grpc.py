"""Tests of requests through Envoy to a router with ``--transport grpc``. The other tests use the HTTP/2 server."""

import asyncio
import json
from pathlib import Path

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import sha256
from harness.deployment import Deployment
from harness.documents import chat, document, member_of, padded, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, sse

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(50)] + [b"data: [DONE]\n\n"]


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
async def test_requests_pass_a_router_on_grpc(engines: SharedEngines, mode: Mode, tmp_path: Path) -> None:
    pools = {"scripted": document("scripted", [member_of(engines.left), member_of(engines.right)])}
    arguments = ("--transport", "grpc")
    async with Deployment(pools, mode=mode, directory=tmp_path, router_arguments=arguments) as deployment:
        bodies = [padded("scripted", size) for size in (1000, 65_536, 3_000_000)] * 10
        replies = await asyncio.gather(*(deployment.ask(body) for body in bodies))
        assert [reply.headers.get(DIGEST_HEADER) for reply in replies] == [sha256(body) for body in bodies]
        assert all(receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER] for reply in replies)
        engines.left.answer = engines.right.answer = sse(EVENTS)
        stream = await deployment.ask(json.dumps(chat("scripted", stream=True)).encode())
        assert stream.body == b"".join(EVENTS)
        assert await deployment.metric("dualmap_http2_connections") == 0
        await deployment.wait_for_rest()
