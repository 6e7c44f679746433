"""Tests that bodies of all sizes, framings and protocols pass Envoy and the router unchanged, by their digests."""

import asyncio
import json

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http2, sha256, upload
from harness.deployment import CHAT, Deployment
from harness.documents import chat, error_of, padded, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

CHUNK_BYTES = 62_000
MIB = 1 << 20
LIMIT_BYTES = 16 * MIB
JSON_HEADERS = {"content-type": "application/json"}


@pytest.mark.parametrize("edge", [16_384, CHUNK_BYTES, 65_536, 2 * CHUNK_BYTES])
async def test_bodies_near_chunk_size_arrive_complete(
    engines: SharedEngines, deployment: Deployment, edge: int
) -> None:
    for size in (edge - 1, edge, edge + 1):
        body = padded("scripted", size)
        for chunk_bytes in (0, edge // 2):
            reply = await deployment.ask(body, chunk_bytes=chunk_bytes)
            assert reply.status == 200
            assert reply.headers[DIGEST_HEADER] == sha256(body)
            assert receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER]


async def test_body_in_single_byte_chunks_is_routed(engines: SharedEngines, deployment: Deployment) -> None:
    body = json.dumps(chat("scripted", "as slow as can be")).encode()
    reply = await deployment.ask(body, chunk_bytes=1)
    assert reply.headers[DIGEST_HEADER] == sha256(body)
    assert "x-dualmap-decision" in reply.headers


@pytest.mark.parametrize("size", [12_000_000, LIMIT_BYTES], ids=["12 MB", "the limit"])
@pytest.mark.parametrize("chunk_bytes", [0, 100_000], ids=["content length", "chunked"])
async def test_large_bodies_arrive_complete(
    engines: SharedEngines, deployment: Deployment, size: int, chunk_bytes: int
) -> None:
    if deployment.mode is Mode.BUFFERED and size == LIMIT_BYTES:
        size -= 1  # Envoy rejects a body that fills its buffer.
    body = padded("scripted", size)
    reply = await deployment.ask(body, chunk_bytes=chunk_bytes)
    assert reply.status == 200
    assert reply.headers[DIGEST_HEADER] == sha256(body)
    assert "x-dualmap-decision" in reply.headers


async def test_large_body_reaches_a_simulated_engine(engines: SharedEngines, deployment: Deployment) -> None:
    body = padded("fast", 12_000_000)
    reply = await deployment.ask(body)
    assert reply.status == 200
    assert reply.headers[DIGEST_HEADER] == sha256(body)
    assert json.loads(reply.body)["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("chunk_bytes", [0, 100_000], ids=["content length", "chunked"])
async def test_body_above_the_limit_gets_413(engines: SharedEngines, deployment: Deployment, chunk_bytes: int) -> None:
    for size in (LIMIT_BYTES + 1, 40_000_000):
        reply = await upload(deployment.envoy.port, CHAT, padded("scripted", size), chunk_bytes=chunk_bytes)
        assert reply.status == 413
        if deployment.mode is not Mode.BUFFERED or not chunk_bytes:
            # Envoy rejects a body without a length that exceeds its buffer.
            assert error_of(reply)["code"] == "request_too_large"
    assert not engines.left.received
    assert not engines.right.received


@pytest.mark.parametrize("trailers", [(), (("x-checksum", "abc"),)], ids=["no trailers", "trailers"])
async def test_http2_bodies_arrive_complete(
    engines: SharedEngines, deployment: Deployment, trailers: tuple[tuple[str, str], ...]
) -> None:
    port = deployment.envoy.port
    for body in (json.dumps(chat("scripted", "hi")).encode(), padded("scripted", 100_000), padded("scripted", 5 * MIB)):
        for headers in (JSON_HEADERS, {**JSON_HEADERS, "content-length": str(len(body))}):
            reply = await http2(port, path=CHAT, body=body, headers=headers, trailers=trailers)
            assert reply.status == 200
            assert reply.headers[DIGEST_HEADER] == sha256(body)
            assert receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER]
    refused = await http2(port, path=CHAT, body=b"{}", headers=JSON_HEADERS, trailers=trailers)
    assert refused.status == 400


@pytest.mark.parametrize("body", [b"not json", b"[1,2]", b"nope}", b'{"model": nope}', b'{"model": 1}', b"5"])
async def test_http2_invalid_body_with_trailers_gets_400(
    engines: SharedEngines, deployment: Deployment, body: bytes
) -> None:
    reply = await http2(
        deployment.envoy.port, path=CHAT, body=body, headers=JSON_HEADERS, trailers=(("x-checksum", "abc"),)
    )
    assert reply.status == 400
    assert error_of(reply)["code"] == "invalid_request"
    assert not engines.left.received
    assert not engines.right.received


async def test_concurrent_http2_bodies_with_trailers_arrive_complete(
    engines: SharedEngines, deployment: Deployment
) -> None:
    bodies = [padded("scripted", 1000 + 7919 * number) for number in range(24)]
    trailers = (("x-checksum", "abc"),)
    replies = await asyncio.gather(
        *(
            http2(deployment.envoy.port, path=CHAT, body=body, headers=JSON_HEADERS, trailers=trailers)
            for body in bodies
        )
    )
    assert [reply.headers.get(DIGEST_HEADER) for reply in replies] == [sha256(body) for body in bodies]
    assert all("x-dualmap-decision" in reply.headers for reply in replies)


async def test_http2_body_above_the_limit_gets_413(engines: SharedEngines, deployment: Deployment) -> None:
    reply = await http2(deployment.envoy.port, path=CHAT, body=padded("scripted", LIMIT_BYTES + MIB))
    assert reply.status == 413
    assert not engines.left.received
    assert not engines.right.received
