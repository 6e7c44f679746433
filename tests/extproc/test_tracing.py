"""Tests of spans: the collector's data for each decision, and no imports for tracing in a router without export."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import get_args

import pytest
from click.testing import CliRunner
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dualmap_extproc.app import options as options_module
from dualmap_extproc.app.main import router
from dualmap_extproc.errors import Refused, no_endpoint
from dualmap_extproc.request.observations import Arrival, FanOut, Observation, Rejected
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry import tracing as tracing_module
from dualmap_extproc.telemetry.tracing import TRACE_HEADERS, Tracing, clock_offset_ns, tracing_to
from extproc.envoy_messages import (
    MODES,
    Conversation,
    Recorder,
    chat,
    crowded_pool,
    destination,
    pool,
    refused_with,
    request_body,
    request_headers,
)
from otlp_collector import Collector, values

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"
SECRET = "the quick brown prompt"
LONG = chat("long " * 10_000)


class Desk:
    """A picker that exports spans to a collector; ``spans`` exports the remaining spans and ends the export."""

    def __init__(self, collector: Collector, *pools) -> None:
        self._collector = collector
        self.tracing = tracing_to(collector.endpoint, replica_id="r1", version="1.2.3")
        self.observer = Recorder()
        observations = FanOut()
        self.tracing.subscribe(observations)
        for kind in get_args(Observation):
            observations.subscribe(kind, self.observer.report)
        self.picker = Picker(Limits(), observations.report, id_prefix="r1", observed_headers=TRACE_HEADERS)
        self.picker.set_pools(0.0, pools or (pool(),))
        self.resumed: list[Picked | Refused] = []

    def ask(self, body: bytes = chat(SECRET), *, now=10.0, **headers: str) -> Picked | Refused | AnswerLater:
        return self.picker.pick(now, body, None, now - 0.5, headers=headers, resume=self.resumed.append)

    def spans(self) -> list[Span]:
        self.tracing.close()
        return self._collector.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


def test_span_of_a_decision_has_the_receipt_and_parent(collector):
    desk = Desk(collector)

    before = time.time_ns()
    now = (before - clock_offset_ns()) / 1e9 + 0.25
    picked = desk.ask(now=now, traceparent=SAMPLED, tracestate="vendor=1")

    (span,) = desk.spans()
    receipt = picked.decision.receipt
    assert span.name == "dualmap.route"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.trace_state == "vendor=1"
    assert values(span.attributes) == {
        "dualmap.request_id": picked.request_id,
        "dualmap.pool": "llm/qwen",
        "dualmap.policy": "dualmap",
        "dualmap.rule": receipt.rule,
        "dualmap.pair": list(receipt.pair),
        "dualmap.chosen": receipt.chosen,
        "dualmap.endpoint": receipt.address,
        "dualmap.prompt_tokens": receipt.prompt_tokens,
        "dualmap.matched_tokens": 0,
        "dualmap.key_blocks": receipt.key.blocks,
        "dualmap.predicted_ttft_s": receipt.predicted_ttft_s,
    }
    # The span begins at the request's arrival, half a second before the decision, and ends with the decision.
    assert span.start_time_unix_nano < before < span.end_time_unix_nano
    assert span.end_time_unix_nano - span.start_time_unix_nano == 0.5e9
    assert span.status.code == Status.STATUS_CODE_UNSET
    (resource,) = collector.resources
    assert resource["service.name"] == "dualmap-router"
    assert resource["service.instance.id"] == "r1"
    assert resource["service.version"] == "1.2.3"


def test_span_is_omitted_if_the_client_does_not_sample(collector):
    desk = Desk(collector)
    assert isinstance(desk.ask(traceparent=UNSAMPLED), Picked)
    assert isinstance(desk.ask(b"{}", traceparent=UNSAMPLED), Refused)
    desk.ask(traceparent=SAMPLED)
    assert len(desk.spans()) == 1


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
def test_span_without_parent_starts_a_new_trace(collector, headers):
    desk = Desk(collector)
    desk.ask(**headers)
    (span,) = desk.spans()
    assert not span.parent_span_id
    assert span.trace_id.hex() != TRACE


@pytest.mark.parametrize(
    ("body", "status", "code", "failed"),
    [
        (b"{}", 400, "invalid_request", False),
        (chat(SECRET, model="unknown"), 404, "model_not_found", False),
        (chat(SECRET, model="empty"), 503, "no_endpoint", True),
    ],
)
def test_span_of_a_rejection_has_its_status(collector, body, status, code, failed):
    desk = Desk(collector, pool(), pool("empty", model="empty", members=0))
    assert desk.ask(body, traceparent=SAMPLED).status == status
    (span,) = desk.spans()
    found = values(span.attributes)
    assert (found["http.response.status_code"], found["error.type"]) == (status, code)
    assert ("dualmap.pool" in found) == (status == 503)
    assert (span.status.code == Status.STATUS_CODE_ERROR) == failed
    assert len(desk.observer.events) == 1


def test_span_of_a_queued_request_has_the_queue_time(collector):
    desk = Desk(collector, crowded_pool())
    desk.ask(LONG, traceparent=UNSAMPLED)
    assert isinstance(desk.ask(traceparent=SAMPLED), AnswerLater)
    assert isinstance(desk.ask(traceparent=UNSAMPLED), AnswerLater)

    desk.picker.stop_queueing(13.0)

    assert [type(each) for each in desk.resumed] == [Picked, Picked]
    (span,) = desk.spans()
    assert values(span.attributes)["dualmap.held_s"] == 3.0
    assert span.end_time_unix_nano - span.start_time_unix_nano == 3.5e9
    assert values(span.attributes)["dualmap.request_id"] in {each.request_id for each in desk.resumed}


def test_span_of_an_aborted_queued_request_ends(collector):
    desk = Desk(collector, crowded_pool())
    desk.ask(LONG, traceparent=UNSAMPLED)
    waiting = desk.ask(traceparent=SAMPLED)
    desk.picker.aborted(12.0, waiting.request_id)
    (span,) = desk.spans()
    assert values(span.attributes).keys() == {"dualmap.held_s", "error.type"}


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_stream_reads_the_trace_and_keeps_the_trace_header(collector, config):
    desk = Desk(collector)
    talk = Conversation(picker=desk.picker)
    first = talk.send(request_headers(config, traceparent=SAMPLED, tracestate="vendor=1"))
    answers = [*first, *talk.send(request_body(chat(SECRET)))]
    assert any(destination(answer) for answer in answers)
    for answer in answers:
        assert not TRACE_HEADERS & set(str(answer).split(chr(34))), "neither set nor removed"
    (span,) = desk.spans()
    assert (span.trace_id.hex(), span.trace_state) == (TRACE, "vendor=1")


def test_rejection_before_the_body_creates_a_span(collector):
    desk = Desk(collector)
    for traceparent in (SAMPLED, UNSAMPLED):
        headers = {"content-length": str(1 << 30), "traceparent": traceparent}
        assert refused_with(Conversation(picker=desk.picker).send(request_headers(**headers))) == 413
    (span,) = desk.spans()
    assert span.trace_id.hex() == TRACE
    assert values(span.attributes)["http.response.status_code"] == 413


def test_span_contains_no_prompt_text(collector):
    desk = Desk(collector)
    desk.ask()
    desk.ask(chat(SECRET, model=SECRET))
    desk.ask(SECRET.encode())
    for span in desk.spans():
        assert SECRET.encode() not in span.SerializeToString()
    assert len(collector.spans) == 3


def test_export_to_dead_collector_logs_once_and_delays_no_request(collector, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="dualmap_extproc")
    monkeypatch.setattr(tracing_module, "_EXPORT_TIMEOUT_S", 0.2)
    collector.stop()
    desk = Desk(collector)

    for _ in range(3):
        assert isinstance(desk.ask(traceparent=SAMPLED), Picked)
        desk.tracing._provider.force_flush()
    said = ["Dropping spans, export failed"]
    assert [record.message for record in caplog.records] == said

    collector.start()
    while len(caplog.records) == 1:
        desk.ask(traceparent=SAMPLED)
        desk.tracing._provider.force_flush()
    assert [record.message for record in caplog.records] == [*said, "Span export recovered"]
    assert collector.spans
    desk.tracing.close()


class Stuck(SpanExporter):
    """An exporter that accepts spans when the test allows it; ``taken`` counts accepted spans."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.taken = 0

    def export(self, spans) -> SpanExportResult:
        self.let.wait(60.0)
        self.taken += len(spans)
        return SpanExportResult.SUCCESS


def tell(tracing: Tracing, spans: int, **headers: str) -> None:
    observations = FanOut()
    tracing.subscribe(observations)
    for _ in range(spans):
        arrival = Arrival(at_s=0.0, headers=headers)
        observations.report(Rejected(now=0.0, pool="", refused=no_endpoint(""), arrival=arrival))


def test_tracing_reads_the_clock_offset_at_start_and_per_export(monkeypatch):
    monkeypatch.setattr(tracing_module, "_BATCH_SPANS", 1)

    class Keeping(SpanExporter):
        def __init__(self) -> None:
            self.ends_ns: list[int | None] = []
            self.exported = threading.Event()

        def export(self, spans) -> SpanExportResult:
            self.ends_ns += [span.end_time for span in spans]
            self.exported.set()
            return SpanExportResult.SUCCESS

    keeping = Keeping()
    tracing = Tracing(keeping, replica_id="r", version="1", offset_ns=count(1000, 4000).__next__)
    tell(tracing, 1)
    assert keeping.exported.wait(60.0)
    tell(tracing, 1)
    tracing.close()
    # Both decisions are at 0 of the monotonic clock; the wall clock jumps between the decisions.
    assert keeping.ends_ns == [1000, 5000]


def test_export_close_has_a_bounded_wait(monkeypatch):
    monkeypatch.setattr(tracing_module, "FLUSH_S", 0.1)
    stuck = Stuck()
    tracing = Tracing(stuck, replica_id="r", version="1")
    tell(tracing, 1)
    tracing.close()
    assert not stuck.let.is_set()
    stuck.let.set()


def test_export_with_full_queue_drops_spans_and_logs_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="dualmap_extproc")
    monkeypatch.setattr(tracing_module, "QUEUE_SPANS", 8)
    monkeypatch.setattr(tracing_module, "_BATCH_SPANS", 4)
    stuck = Stuck()
    tracing = Tracing(stuck, replica_id="r", version="1")
    tell(tracing, 100)
    said = ["Dropping spans, export queue is full"]
    assert [record.message for record in caplog.records] == said
    stuck.let.set()
    tracing.close()
    # These are the spans in export and the waiting spans.
    assert 8 <= stuck.taken <= 4 + 8
    assert [record.message for record in caplog.records] == [*said, "Span export queue has room again"]


@pytest.mark.parametrize(("setting", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_SAMPLER", "always_off")])
def test_export_disabled_by_environment_queues_no_span(monkeypatch, caplog, setting, value):
    monkeypatch.setenv(setting, value)
    monkeypatch.setattr(tracing_module, "QUEUE_SPANS", 8)
    monkeypatch.setattr(tracing_module, "_BATCH_SPANS", 4)
    stuck = Stuck()
    tracing = Tracing(stuck, replica_id="r", version="1")
    tell(tracing, 100, traceparent=SAMPLED)
    stuck.let.set()
    tracing.close()
    assert (stuck.taken, caplog.records) == (0, [])


def test_export_failure_is_logged(caplog):
    class Broken(Stuck):
        def export(self, spans) -> SpanExportResult:
            raise ValueError("planted")

    tracing = Tracing(Broken(), replica_id="r", version="1")
    tell(tracing, 1)
    tracing.close()
    assert [record.message for record in caplog.records] == ["Dropping spans, export failed"]


UNTOUCHED = """
import asyncio, os, signal, sys
from pathlib import Path
from dualmap_extproc.settings import Settings
from dualmap_extproc.app import wiring

async def run():
    settings = Settings(
        pools=(Path(sys.argv[1]),), replica_id="r", host="127.0.0.1",
        grpc_port=0, health_port=0, metrics_port=0, als_port=0,
    )
    serving = asyncio.create_task(wiring.serve(settings))
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving

asyncio.run(run())
unwanted = ("opentelemetry", "dualmap_extproc.telemetry.tracing")
loaded = [name for name in sys.modules if name.startswith(unwanted)]
sys.exit(str(loaded) if loaded else 0)
"""


def test_router_without_export_imports_no_opentelemetry(tmp_path):
    document = tmp_path / "pool.yaml"
    document.write_text(
        "apiVersion: serving.dualmap.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: qwen, namespace: llm}\n"
        "spec: {model: {name: m}}\nstatus: {ring: {version: 1, members: []}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED, str(document)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_router_without_export_reads_no_trace_headers():
    assert not Picker(Limits(), Recorder().report, id_prefix="r").kept_headers & TRACE_HEADERS


def test_router_without_tracing_extra_error_names_the_package(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(options_module, "find_spec", missing)
    result = CliRunner().invoke(router, ["--pool", "p.yaml", "--otlp-endpoint", "http://collector:4317"])
    assert result.exit_code == 2
    assert "pip install 'dualmap[otlp]'" in result.stderr


@pytest.mark.parametrize(
    "url",
    [
        "collector:4317",
        "grpc://collector:4317",
        "http://collector",
        "http://:4317",
        "http://c:4317/v1/traces",
        "http://c:x",
    ],
)
def test_router_with_invalid_otlp_endpoint_is_a_usage_error(url):
    result = CliRunner().invoke(router, ["--pool", "p.yaml", "--otlp-endpoint", url])
    assert result.exit_code == 2
    assert "give http://HOST:PORT" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-3")]
)
def test_router_with_invalid_otel_environment_exits_with_one_line(tmp_path, name, value):
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "{apiVersion: serving.dualmap.dev/v1alpha1, kind: InferencePool, metadata: {name: qwen}, "
        "spec: {model: {name: m}}}"
    )
    ports = [f"--{port}-port=0" for port in ("grpc", "health", "metrics", "als")]
    argv = [sys.executable, "-m", "dualmap_cli", "router", f"--pool={pool}", "--otlp-endpoint=http://127.0.0.1:1"]
    done = subprocess.run([*argv, *ports], env={**os.environ, name: value}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("dualmap router: invalid OTEL_* environment variables: ")
    assert name in done.stderr
    assert "Traceback" not in done.stderr
