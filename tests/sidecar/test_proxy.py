"""Requests that pass the proxy without a prefill."""

import asyncio
import hashlib
import io
import json

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from dualmap_sidecar.settings import Limits
from sidecar_site import Site, cut, decoded, silent, site, with_status


async def test_request_passes_in_every_byte() -> None:
    body = b' {"prompt" : "\\u00e9", "n":1.0}\n'
    async with site() as made:
        headers = {"Content-Type": "application/json; x=1", "X-Twice": "a", "Cookie": "c=1", "Accept-Encoding": "br"}
        async with made.client.post(
            URL(f"{made.url}/v1/completions?a=%2F&b=+", encoded=True), data=body, headers=headers
        ):
            pass
        (received,) = made.engine.received
        assert (received.method, received.path, received.body) == ("POST", "/v1/completions?a=%2F&b=+", body)
        assert headers.items() <= dict(received.headers).items()
        assert received.headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
async def test_every_method_passes(method: str) -> None:
    async with site(engine=with_status(200, b"answer")) as made:
        body = b"some \xff bytes" if method in ("PUT", "PATCH") else None
        async with made.client.request(method, URL(f"{made.url}/any/%2e%2e/path", encoded=True), data=body) as response:
            assert response.status == 200
            assert await response.read() == (b"" if method == "HEAD" else b"answer")
            assert response.headers["x-from"] == "prefiller"
        (received,) = made.engine.received
        assert (received.method, received.path, received.body) == (method, "/any/%2e%2e/path", body or b"")


@pytest.mark.parametrize("path", ["/health", "/metrics", "//evil.example/x", "/@evil.example/x", "/a//b?x=http://y"])
async def test_path_leads_only_to_the_engine(path: str) -> None:
    async with site() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert made.engine.received[0].path == path


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/x", "evil.example:443", "*"])
async def test_request_target_that_is_no_path_is_refused(target: str) -> None:
    async with site() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert b" 400 " in await reader.readline()
        writer.close()
        assert not made.engine.received


async def test_redirect_goes_to_the_client() -> None:
    async with site(engine=with_status(307)) as made:
        async with made.client.get(f"{made.url}/docs", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, "http://127.0.0.1/")
        assert len(made.engine.received) == 1


async def test_stream_passes_piece_by_piece() -> None:
    proceed = asyncio.Queue[None]()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(5):
            await response.write(f"data: {number}\n\n".encode())
            await proceed.get()
        return response

    async with (
        site(engine=answer) as made,
        made.client.post(f"{made.url}/v1/completions", json={"stream": True}) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for number in range(5):
            assert await response.content.readany() == f"data: {number}\n\n".encode()
            proceed.put_nowait(None)
        assert await response.content.readany() == b""


async def test_cut_stream_is_cut_for_the_client() -> None:
    async with site(engine=cut) as made:
        with pytest.raises(aiohttp.ClientPayloadError):
            await made.complete({})


async def test_cut_chunked_stream_is_cut_for_the_client() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.close()
        return response

    async with site(engine=answer) as made:
        with pytest.raises(aiohttp.ClientPayloadError):
            await made.complete({})


async def test_compressed_bodies_pass_as_they_are() -> None:
    packed = b"\x1f\x8b not really gzip"

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with site(engine=answer) as made:
        async with made.client.post(f"{made.url}/x", data=packed, headers={"Content-Encoding": "gzip"}) as response:
            assert await response.read() == packed
        assert made.engine.received[0].body == packed


async def test_large_upload_streams_without_being_held() -> None:
    body, boundary = b"x" * 3_000_000, "b"
    async with site(limits=Limits(body_bytes=1000, buffered_bytes=1000)) as made:
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        async with made.client.post(
            f"{made.url}/v1/audio/transcriptions", data=io.BytesIO(body), headers=headers
        ) as response:
            assert response.status == 200
        assert hashlib.sha256(made.engine.received[0].body).digest() == hashlib.sha256(body).digest()


async def test_long_prompt_passes() -> None:
    async with site() as made:
        body = json.dumps({"prompt": "x" * 3_000_000}).encode()
        async with made.client.post(f"{made.url}/v1/completions", data=io.BytesIO(body)) as response:
            assert response.status == 200
        assert made.engine.received[0].body == body


async def test_body_above_the_limit_is_refused() -> None:
    async with site(limits=Limits(body_bytes=1000)) as made:
        response = await made.complete({}, prompt="x" * 1000)
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
        assert not made.engine.received


async def test_bodies_above_the_limit_of_all_are_refused() -> None:
    async with site(limits=Limits(buffered_bytes=1000)) as made:
        assert (await made.complete({}, prompt="x" * 1000)).status == 503
        assert (await made.complete({}, prompt="x" * 100)).status == 200


async def test_body_of_a_running_stream_is_not_held() -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.Event().wait()
        return response

    async with site(engine=answer, limits=Limits(buffered_bytes=1000)) as made:
        streams = [
            await made.client.post(f"{made.url}/v1/completions", json={"prompt": "x" * 600, "stream": True})
            for _ in range(3)
        ]
        assert [stream.status for stream in streams] == [200, 200, 200]
        for stream in streams:
            stream.close()


async def test_body_that_does_not_arrive_is_refused() -> None:
    async with site(limits=Limits(body_s=0.1)) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_body_in_invalid_chunks_is_refused() -> None:
    async with site() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2\r\n{}\r\nzz\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        assert not made.engine.received


async def test_client_that_expects_continue_gets_it() -> None:
    async with site() as made:
        async with made.client.post(f"{made.url}/v1/completions", json={"a": 1}, expect100=True) as response:
            assert response.status == 200
        assert "Expect" not in made.engine.received[0].headers


async def test_headers_of_one_connection_do_not_pass() -> None:
    async with site() as made:
        headers = {"Connection": "X-Hop, keep-alive", "X-Hop": "1", "TE": "trailers", "Upgrade": "h2c", "X-End": "1"}
        async with made.client.get(f"{made.url}/x", headers=headers) as response:
            assert response.status == 200
        passed = made.engine.received[0].headers
        assert "X-End" in passed
        assert not {"X-Hop", "TE", "Upgrade"} & set(passed)


async def test_stopped_engine_is_unavailable() -> None:
    async with site() as made:
        await made.engine.stop()
        response = await made.complete({})
        assert response.status == 503
        error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("engine_unavailable", "server_error")


async def test_body_that_is_no_json_goes_to_the_engine() -> None:
    async with site(engine=with_status(400, b"not JSON")) as made:
        async with made.client.post(f"{made.url}/v1/completions", data=b"{not JSON") as response:
            assert response.status == 400
        assert made.engine.received[0].body == b"{not JSON"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": "application/json", "Content-Encoding": "x-unknown"},
        {"Content-Type": "multipart/form-data; boundary=b"},
    ],
)
async def test_body_that_could_hide_kv_parameters_is_refused(headers: dict[str, str]) -> None:
    async with site() as made:
        body = b'{"kv_transfer_params": {"remote_host": "10.0.0.1"}}'
        async with made.client.post(f"{made.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == 415
        assert not made.engine.received


async def test_body_with_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap_sidecar.json_object.ELEMENTS_MAX", 10)
    async with site() as made:
        response = await made.complete({}, prompt=[[1]] * 20)
        assert response.status == 400
        assert not made.engine.received


async def test_drain_completes_requests_and_accepts_no_further_ones() -> None:
    go = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await go.wait()
        return await decoded(request)

    async with site(engine=answer) as made:
        asked = asyncio.create_task(made.complete({}))
        await made.engine.arrived.wait()
        assert made.count("dualmap_pd_in_flight_requests") == 1
        drained = asyncio.create_task(made.server.drain(30.0))
        await refused(made)
        assert not drained.done()
        go.set()
        response = await asked
        await drained
        assert response.status == 200


async def refused(made: Site) -> None:
    """Wait until the proxy accepts no further connection."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0)


async def test_drain_ends_with_its_timeout() -> None:
    async with site(engine=silent) as made:
        asked = asyncio.create_task(made.complete({}))
        await made.engine.arrived.wait()
        await made.server.drain(0.05)
        await made.server.close()
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_connection_above_the_limit_replaces_an_idle_one() -> None:
    async with site(limits=Limits(connections=2)) as made:
        port = int(made.url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await made.complete({})).status == 200
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


async def test_long_header_passes_up_to_the_limit() -> None:
    async with site(limits=Limits(header_bytes=20_000)) as made:
        for length, status in ((15_000, 200), (25_000, 400)):
            async with made.client.get(f"{made.url}/x", headers={"X-Long": "x" * length}) as response:
                assert response.status == status
        assert json.loads(made.engine.received[0].body or b"{}") == {}
