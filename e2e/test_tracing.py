"""Tests of traces through the real Envoy and router: unchanged headers at the engine, and spans at a collector."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import chat, document, member_of, receipt
from harness.upstream import Upstream
from harness.waiting import until
from otlp_collector import Collector, values

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=2"}

modes = pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)


@pytest.fixture(name="collector")
def _collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest_asyncio.fixture(name="engine")
async def _engine() -> AsyncIterator[Upstream]:
    async with Upstream(name="engine") as engine:
        yield engine


def assert_carried(engine: Upstream) -> None:
    received = engine.received[-1].headers
    assert {name: received.get(name) for name in HEADERS} == HEADERS


@modes
@pytest.mark.always_picked
async def test_decision_span_belongs_to_the_client_trace(
    mode: Mode, collector: Collector, engine: Upstream, tmp_path: Path
) -> None:
    pools = {"traced": document("traced", [member_of(engine)])}
    arguments = ("--otlp-endpoint", collector.endpoint)
    async with Deployment(pools, mode=mode, directory=tmp_path, router_arguments=arguments) as deployment:
        reply = await deployment.ask(chat("traced"), headers=HEADERS)
        assert reply.status == 200
        assert_carried(engine)
        await until(lambda: _any(collector), "the collector has a span", timeout_s=30.0)
        (span,) = collector.spans
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        attributes = values(span.attributes)
        assert attributes["dualmap.chosen"] == receipt(reply)["chosen"] == "engine"
        assert attributes["dualmap.rule"] == receipt(reply)["rule"]
        (resource,) = collector.resources
        assert resource["service.instance.id"] == "router"

        unknown = await deployment.ask(chat("nobody"), headers=HEADERS)
        assert unknown.status == 404
        # The router exports its remaining spans at its end.
        await deployment.router.stop()
        assert [values(each.attributes).get("http.response.status_code") for each in collector.spans] == [None, 404]


@modes
@pytest.mark.always_picked
async def test_trace_headers_reach_the_engine_without_a_collector(mode: Mode, engine: Upstream, tmp_path: Path) -> None:
    pools = {"traced": document("traced", [member_of(engine)])}
    async with Deployment(pools, mode=mode, directory=tmp_path) as deployment:
        assert (await deployment.ask(chat("traced"), headers=HEADERS)).status == 200
        assert_carried(engine)
        assert (await deployment.ask(chat("traced"))).status == 200
        assert "traceparent" not in engine.received[-1].headers


async def test_unreachable_collector_delays_no_request_or_shutdown(
    collector: Collector, engine: Upstream, tmp_path: Path
) -> None:
    collector.stop()
    pools = {"traced": document("traced", [member_of(engine)])}
    arguments = ("--otlp-endpoint", collector.endpoint)
    async with Deployment(pools, mode=Mode.STREAMED, directory=tmp_path, router_arguments=arguments) as deployment:
        for _ in range(20):
            assert (await deployment.ask(chat("traced"))).status == 200
        await deployment.router.wait_for_line("Dropping spans, export failed")
        deployment.router.terminate()
        assert await deployment.router.wait(timeout_s=40.0) == 0
        assert deployment.router.output().count("Dropping spans, export failed") == 1
        assert "Traceback" not in deployment.router.output()


async def _any(collector: Collector) -> bool:
    return bool(collector.spans)
