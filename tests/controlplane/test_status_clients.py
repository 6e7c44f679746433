"""Tests of status requests to real servers on loopback: DualMap's router and engine, and faulty servers."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import pytest

import builders
from dualmap.requests import Decision
from dualmap.router import PoolRouter
from dualmap_extproc.request.observations import Arrival, FanOut, Routed
from dualmap_extproc.telemetry.counts import Traffic
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_operator.decide.observed import EndpointReport, RouterReport, TokenizerReport
from dualmap_operator.observe.status_clients import EngineClient, RouterAddress, RouterClient
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import ServerSettings
from waiting import until

HOST = "127.0.0.1"
# Long enough for every answering server, so that a missing result means a rejected answer.
PATIENT_S = 60.0
STANDING_STILL = 1e-6
POOL: dict[str, Any] = {
    "router": "router-0",
    "ring_version": 7,
    "held": 3,
    "traffic": asdict(Traffic(requests=9)),
    "endpoints": [
        {"id": "qwen-0", "state": "Active", "in_flight": 2, "held": 1, "pending_prefill_tokens": 10},
        {"id": "qwen-1", "state": "Draining", "in_flight": 0, "held": 0, "pending_prefill_tokens": 0},
    ],
}
BODY = json.dumps(POOL).encode()
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(kw_only=True)
class Peer:
    """A server that a test controls: its port, the heads of its received requests, and its connections."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    open: int = 0
    most_open: int = 0


@pytest.fixture(name="routers")
async def _routers() -> AsyncIterator[RouterClient]:
    client = RouterClient()
    yield client
    await client.close()


@pytest.fixture(name="engines")
async def _engines() -> AsyncIterator[EngineClient]:
    client = EngineClient()
    yield client
    await client.close()


@asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[Peer]:
    """A server that reads a request's head and then runs ``talk``."""
    peer = Peer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.open += 1
        peer.most_open = max(peer.open, peer.most_open)
        with suppress(OSError, asyncio.IncompleteReadError):
            peer.heads.append(await reader.readuntil(b"\r\n\r\n"))
            await talk(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        peer.open -= 1

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        peer.port = server.sockets[0].getsockname()[1]
        yield peer
        await until(lambda: peer.open == 0)


def saying(body: bytes, *, status: str = "200 OK", headers: str = "", length: int | None = None) -> Talk:
    """Answer with this text; ``length`` sets a wrong content length."""
    claimed = len(body) if length is None else length
    return sending(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {claimed}\r\n\r\n".encode() + body)


def sending(answer: bytes) -> Talk:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return talk


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def trickling(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send data without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"1\r\n{\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send data as fast as the client reads."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b" " * 65_536
    while not writer.is_closing():
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()


MISBEHAVIOUR: dict[str, Talk] = {
    "nothing": saying(b""),
    "garbage": saying(b"\x00\xff\xfe{]"),
    "a web page": saying(b"<html>it works</html>\n", headers="Content-Type: text/html\r\n"),
    "an error": saying(BODY, status="500 Internal Server Error"),
    "less than it claims": saying(BODY, length=len(BODY) + 1),
    "compressed": saying(gzip.compress(BODY), headers="Content-Encoding: gzip\r\n"),
    "no HTTP": sending(b"SSH-2.0-OpenSSH_9.9\r\n\r\n"),
    "the end of the connection": sending(b""),
    "no end": endless,
}


async def report(routers: RouterClient, port: int, *, timeout_s: float = PATIENT_S) -> RouterReport:
    ((report, _),) = await routers.reports("llm/qwen", [RouterAddress(host=HOST, port=port)], timeout_s=timeout_s)
    return report


class TestRouters:
    async def test_status_client_parses_the_response_of_the_actual_program(self, routers: RouterClient) -> None:
        router = PoolRouter(builders.pool(2))
        metrics = Metrics(version="1", replica_id="router-0")
        metrics.set_pools([router.pool])
        decision = router.on_request(0.0, builders.request("r", builders.text_of(1000, "a"))).answer
        assert isinstance(decision, Decision)
        observations = FanOut()
        metrics.subscribe(observations)
        arrival = Arrival(at_s=0.0, headers={})
        observations.report(Routed(now=0.0, pool="llm/qwen", decision=decision, arrival=arrival))
        server = StatusServer(
            router="router-0", statuses=lambda: (router.status(),), signals=lambda _: {}, metrics=metrics
        )
        port = await server.start(HOST, 0)
        address = RouterAddress(host=HOST, port=port, ready=False)
        try:
            ((known, traffic),) = await routers.reports("llm/qwen", [address], timeout_s=PATIENT_S)
            ((unknown, no_traffic),) = await routers.reports("llm/other", [address], timeout_s=PATIENT_S)
        finally:
            await server.close()
        assert (known.answered, known.ready, known.ring_version) == (True, False, 1)
        assert known.endpoints == {
            each: EndpointReport(in_flight=int(each == decision.receipt.chosen), state="Active")
            for each in ("m-0", "m-1")
        }
        assert traffic == asdict(metrics.traffic("llm/qwen"))
        assert (unknown, no_traffic) == (RouterReport(router=f"{HOST}:{port}", ready=False), None)

    async def test_router_client_ignores_404_of_another_server(self, routers: RouterClient) -> None:
        async with listening(saying(b"{}", status="404 Not Found")) as stranger:
            address = RouterAddress(host=HOST, port=stranger.port)
            ((report, _),) = await routers.reports("llm/qwen", [address], timeout_s=PATIENT_S)
        assert not report.answered

    async def test_router_reports_are_in_request_order(self, routers: RouterClient) -> None:
        later = saying(json.dumps({**POOL, "ring_version": 8}).encode())
        async with listening(saying(BODY)) as first, listening(later) as second, listening(saying(b"")) as third:
            ports = (second.port, third.port, first.port)
            addresses = [RouterAddress(host=HOST, port=port) for port in ports]
            reports = await routers.reports("llm/qwen", addresses, timeout_s=PATIENT_S)
        assert [(each.router, each.answered, each.ring_version) for each, _ in reports] == [
            (f"{HOST}:{second.port}", True, 8),
            (f"{HOST}:{third.port}", False, 0),
            (f"{HOST}:{first.port}", True, 7),
        ]
        assert reports[0][0].endpoints == {
            "qwen-0": EndpointReport(in_flight=2, held=1, state="Active"),
            "qwen-1": EndpointReport(in_flight=0, held=0, state="Draining"),
        }

    async def test_router_client_without_routers_returns_no_reports(self, routers: RouterClient) -> None:
        assert await routers.reports("llm/qwen", []) == ()

    @pytest.mark.parametrize("talk", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
    async def test_router_client_returns_no_report_for_invalid_response(
        self, routers: RouterClient, talk: Talk
    ) -> None:
        async with listening(talk) as peer:
            assert await report(routers, peer.port) == RouterReport(router=f"{HOST}:{peer.port}", answered=False)

    @pytest.mark.parametrize("talk", [silent, trickling])
    async def test_router_client_times_out_on_endless_response(self, routers: RouterClient, talk: Talk) -> None:
        async with listening(talk) as peer, asyncio.timeout(PATIENT_S):
            assert not (await report(routers, peer.port, timeout_s=0.3)).answered

    @pytest.mark.parametrize("host", [HOST, "no such host", "", "999.1.1.1", "h" * 300, "\u2603.example"])
    async def test_router_client_returns_no_report_for_unreachable_router(
        self, routers: RouterClient, host: str
    ) -> None:
        ((report, _),) = await routers.reports("llm/qwen", [RouterAddress(host=host, port=9)])
        assert not report.answered

    @pytest.mark.parametrize(
        "change",
        [
            {"ring_version": None},
            {"ring_version": -1},
            {"ring_version": "7"},
            {"ring_version": True},
            {"endpoints": None},
            {"endpoints": {}},
            {"endpoints": ["qwen-0"]},
            {"endpoints": [{"id": "qwen-0", "in_flight": 0}]},
            {"endpoints": [{"id": "qwen-0", "in_flight": -1, "held": 0}]},
            {"endpoints": [{"id": "qwen-0", "in_flight": 0.5, "held": 0}]},
            {"endpoints": [{"id": 0, "in_flight": 0, "held": 0}]},
        ],
    )
    async def test_router_client_rejects_incomplete_in_flight_counts(
        self, routers: RouterClient, change: dict[str, object]
    ) -> None:
        async with listening(saying(json.dumps({**POOL, **change}).encode())) as peer:
            assert not (await report(routers, peer.port)).answered

    @pytest.mark.parametrize("body", [b"[]", b"7", b"[" * 100_000, b'{"ring_version": ' + b"9" * 5000 + b"}"])
    async def test_router_client_returns_no_report_for_unexpected_json(
        self, routers: RouterClient, body: bytes
    ) -> None:
        async with listening(saying(body)) as peer:
            assert not (await report(routers, peer.port)).answered

    @pytest.mark.parametrize("traffic", [None, [], 7, {}])
    async def test_router_without_traffic_is_reported(self, routers: RouterClient, traffic: object) -> None:
        async with listening(saying(json.dumps({**POOL, "traffic": traffic}).encode())) as peer:
            address = RouterAddress(host=HOST, port=peer.port)
            ((known, counted),) = await routers.reports("llm/qwen", [address], timeout_s=PATIENT_S)
        assert (known.ring_version, counted) == (7, None)

    @pytest.mark.parametrize(
        ("tokenizer", "expected"),
        [
            (
                {
                    "reason": "x",
                    "distrusted": [
                        {"model": "m", "api": "chat", "tools": True},
                        {"model": "m", "api": "chat", "tools": 0},
                    ],
                },
                TokenizerReport(problem="x", differing=("'m' (chat with tools)", "'m' (chat)")),
            ),
            (None, TokenizerReport()),
            ([], TokenizerReport()),
            ({"reason": 7, "distrusted": "no"}, TokenizerReport()),
            ({"reason": "x" * 1000, "distrusted": [7]}, TokenizerReport(problem="x" * 300)),
            ({"distrusted": [{}] * 40}, TokenizerReport(differing=("'' ()",) * 32)),
        ],
    )
    async def test_router_reports_its_token_ids(
        self, routers: RouterClient, tokenizer: object, expected: TokenizerReport
    ) -> None:
        async with listening(saying(json.dumps({**POOL, "tokenizer": tokenizer}).encode())) as peer:
            assert (await report(routers, peer.port)).tokenizer == expected

    @pytest.mark.parametrize(
        ("kv_store", "problem"),
        [
            ({"state": "LeftAlone", "reason": "late"}, "late"),
            ({"state": "LeftAlone", "reason": "x" * 1000}, "x" * 300),
            ({"state": "LeftAlone"}, "no reason"),
            ({"state": "Up", "reason": "the last prompt was for an adapter"}, ""),
            (None, ""),
            (7, ""),
        ],
    )
    async def test_router_reports_why_it_leaves_the_kv_store_alone(
        self, routers: RouterClient, kv_store: object, problem: str
    ) -> None:
        async with listening(saying(json.dumps({**POOL, "kv_store": kv_store}).encode())) as peer:
            assert (await report(routers, peer.port)).kv_store_problem == problem

    async def test_router_report_with_thousand_endpoints_is_parsed(self, routers: RouterClient) -> None:
        many = [{**POOL["endpoints"][0], "id": f"qwen-{n}"} for n in range(1000)]
        async with listening(saying(json.dumps({**POOL, "endpoints": many}).encode())) as peer:
            assert len((await report(routers, peer.port)).endpoints) == 1000

    async def test_router_client_does_not_follow_redirects(self, routers: RouterClient) -> None:
        async with listening(saying(BODY)) as other:
            elsewhere = f"Location: http://{HOST}:{other.port}/pools/llm/qwen\r\n"
            async with listening(saying(BODY, status="302 Found", headers=elsewhere)) as peer:
                assert not (await report(routers, peer.port)).answered
        assert other.heads == []

    async def test_router_client_opens_a_connection_per_request(self, routers: RouterClient) -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await saying(BODY)(reader, writer)
            await reader.read()

        async with listening(talk) as peer:
            for _ in range(2):
                assert (await report(routers, peer.port, timeout_s=10.0)).answered
        assert [head.split(b"\r\n")[0] for head in peer.heads] == [b"GET /pools/llm/qwen HTTP/1.1"] * 2

    async def test_closed_router_client_raises_an_error(self) -> None:
        client = RouterClient()
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await report(client, 9)


VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 100.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 2
sglang:num_queue_reqs{model_name="m"} 1
sglang:num_running_reqs_offline_batch{model_name="m"} 50
"""
TENSORRT = b"trtllm_num_requests_running 4\ntrtllm_num_requests_waiting 0\n"
ODD_LABELS = rb"""vllm:num_requests_running{model_name="a } 7 \" \\"} 1
vllm:num_requests_running{} 2 1795312800000
vllm:num_requests_running	3
vllm:num_requests_running { model_name = "b" } 1e1
vllm:num_requests_waiting 0
"""


async def asked(engines: EngineClient, page: bytes, engine_type: str = "vLLM") -> int | None:
    async with listening(saying(page, headers="Content-Type: text/plain; version=0.0.4\r\n")) as peer:
        return await engines.requests(engine_type, HOST, peer.port, timeout_s=PATIENT_S)


class TestEngines:
    async def test_status_client_parses_the_response_of_the_actual_program(self, engines: EngineClient) -> None:
        settings = ServerSettings(
            host=HOST, port=0, model="m", config=PRESETS["7b"], speed=STANDING_STILL, api_key=None
        )
        server = EngineHttpServer(settings)
        host, _, port = (await server.start()).rpartition(":")
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        try:
            assert await engines.requests("vLLM", host, int(port)) == 0
            async with aiohttp.ClientSession(f"http://{host}:{port}") as session, AsyncExitStack() as under_way:
                for requests in (1, 2):
                    await under_way.enter_async_context(session.post("/v1/chat/completions", json=chat))
                    assert await engines.requests("vLLM", host, int(port), timeout_s=PATIENT_S) == requests

            async def idle() -> bool:
                return await engines.requests("vLLM", host, int(port), timeout_s=PATIENT_S) == 0

            await until(idle)
        finally:
            await server.close()
        assert await engines.requests("vLLM", host, int(port)) is None

    @pytest.mark.parametrize(
        ("engine_type", "page", "path", "requests"),
        [
            ("vLLM", VLLM, b"/metrics", 5),
            ("SGLang", SGLANG, b"/metrics", 3),
            ("TensorRTLLM", TENSORRT, b"/prometheus/metrics", 4),
        ],
    )
    async def test_engine_metrics_of_each_engine_type_are_parsed(
        self, engines: EngineClient, engine_type: str, page: bytes, path: bytes, requests: int
    ) -> None:
        async with listening(saying(page)) as peer:
            assert await engines.requests(engine_type, HOST, peer.port, timeout_s=PATIENT_S) == requests
        assert peer.heads[0].split()[1] == path

    @pytest.mark.parametrize("engine_type", ["Generic", "Other", ""])
    async def test_engine_with_unknown_metrics_is_not_requested(self, engines: EngineClient, engine_type: str) -> None:
        async with listening(saying(VLLM)) as peer:
            assert await engines.requests(engine_type, HOST, peer.port) is None
        assert peer.heads == []

    async def test_engine_counts_on_one_metrics_page_are_summed(self, engines: EngineClient) -> None:
        assert await asked(engines, VLLM + VLLM.replace(b'engine="0"', b'engine="1"')) == 10

    async def test_engine_metrics_labels_of_any_content_are_parsed(self, engines: EngineClient) -> None:
        assert await asked(engines, ODD_LABELS) == 16

    async def test_engine_metrics_with_windows_line_ends_are_parsed(self, engines: EngineClient) -> None:
        assert await asked(engines, VLLM.replace(b"\n", b"\r\n")) == 5

    @pytest.mark.parametrize(
        "value", [b"NaN", b"-1", b"+Inf", b"-Inf", b"", b"two", b"2 3 4", b"1e308\nvllm:num_requests_running 1e308"]
    )
    async def test_invalid_engine_request_count_is_none(self, engines: EngineClient, value: bytes) -> None:
        page = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        assert await asked(engines, page) == 1
        assert await asked(engines, page + b"vllm:num_requests_running %b\n" % value) is None

    @pytest.mark.parametrize("name", [b"running", b"waiting"])
    async def test_engine_count_without_running_or_waiting_is_none(self, engines: EngineClient, name: bytes) -> None:
        lines = [line for line in VLLM.splitlines(keepends=True) if not line.startswith(b"vllm:num_requests_" + name)]
        assert await asked(engines, b"".join(lines)) is None

    @pytest.mark.parametrize("end", [-1, -2, -20])
    async def test_truncated_engine_metrics_page_is_none(self, engines: EngineClient, end: int) -> None:
        page = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:num_requests_waiting{} 12\n"
        assert await asked(engines, page) == 12
        assert await asked(engines, page[:end]) is None

    async def test_fractional_engine_count_is_rounded_up(self, engines: EngineClient) -> None:
        assert await asked(engines, b"vllm:num_requests_running 0.2\nvllm:num_requests_waiting 0\n") == 1

    async def test_engine_metrics_page_of_megabytes_is_parsed(self, engines: EngineClient) -> None:
        buckets = b"".join(b'vllm:ttft_bucket{le="%d",model_name="m"} 0\n' % n for n in range(60_000))
        assert len(buckets) > 2_000_000
        assert await asked(engines, buckets + VLLM + buckets[: 1 << 20].rpartition(b"\n")[0] + b"\n") == 5

    @pytest.mark.parametrize("label", [b"a", b'a="', b'a="b",', rb"\""])
    async def test_engine_metrics_with_huge_labels_take_little_time(self, engines: EngineClient, label: bytes) -> None:
        page = VLLM + b"vllm:cache_config_info{" + label * (2_000_000 // len(label)) + b"} 1\n"
        begun_s = time.process_time()
        assert await asked(engines, page) == 5
        assert time.process_time() - begun_s < 1.0

    @pytest.mark.parametrize("talk", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
    async def test_invalid_engine_response_is_none(self, engines: EngineClient, talk: Talk) -> None:
        async with listening(talk) as peer:
            assert await engines.requests("vLLM", HOST, peer.port, timeout_s=PATIENT_S) is None

    @pytest.mark.parametrize("status", ["404 Not Found", "503 Service Unavailable"])
    async def test_engine_error_response_is_none(self, engines: EngineClient, status: str) -> None:
        async with listening(saying(VLLM, status=status)) as peer:
            assert await engines.requests("vLLM", HOST, peer.port, timeout_s=PATIENT_S) is None

    async def test_silent_engine_does_not_delay_other_engines(self, engines: EngineClient) -> None:
        """The time that a request waits for a free connection does not count towards its timeout."""
        async with listening(silent) as mute, listening(saying(VLLM)) as peer, asyncio.timeout(PATIENT_S):
            questions = [engines.requests("vLLM", HOST, mute.port, timeout_s=0.2) for _ in range(100)]
            *unheard, heard = await asyncio.gather(
                *questions, engines.requests("vLLM", HOST, peer.port, timeout_s=PATIENT_S)
            )
        assert (set(unheard), heard) == ({None}, 5)
        # Connections of timed-out requests may still be closing when the next requests begin.
        assert mute.most_open <= 64
