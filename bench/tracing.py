"""Measures the cost of spans: ratios of the router's time per request with and without tracing.

Each request is a complete exchange of headers, body and first chunk. The measurement excludes gRPC, which takes several
times as long as the router's own work. Exported spans are dropped, because in production the exporter's own thread
encodes and sends them. Rounds alternate between the kinds, and the tenth percentile of each kind counts, as in
``decisions``.
"""

import time
from collections.abc import Callable, Sequence
from statistics import quantiles

import click
from bench.decisions import pool_of
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.telemetry.tracing import TRACE_HEADERS, Tracing
from dualmap_extproc.wire import ext_proc_pb2 as wire

ROUNDS = 400
REQUESTS = 20
MEMBERS = 8
PROMPT = "All work and no play makes Jack a dull boy. " * 100
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = SAMPLED[:-1] + "0"


class Nowhere(SpanExporter):
    """Drops every span."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def messages(traceparent: str) -> list[wire.ProcessingRequest]:
    """Return Envoy's messages for one request, in no-wait STREAMED mode."""
    head = wire.ProcessingRequest(
        protocol_config=wire.ProtocolConfiguration(
            request_body_mode=wire.STREAMED,
            response_body_mode=wire.STREAMED,
            send_body_without_waiting_for_header_response=True,
        )
    )
    names = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    for key, value in (names | ({"traceparent": traceparent} if traceparent else {})).items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "{PROMPT}"}}]}}'.encode()
    answered = wire.ProcessingRequest()
    answered.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return [
        head,
        wire.ProcessingRequest(request_body=wire.HttpBody(body=body, end_of_stream=True)),
        answered,
        wire.ProcessingRequest(response_body=wire.HttpBody(body=b"data: {}\n\n", end_of_stream=True)),
    ]


def conversation(picker: Picker, said: list[wire.ProcessingRequest], limits: Limits) -> Callable[[float], None]:
    """Return a function that processes one request per call."""
    buffered = BufferedBodies(limits.buffered_bytes)
    encoded = [message.SerializeToString() for message in said]

    def run(now: float) -> None:
        stream = Stream(picker, limits, lambda answers: None, buffered)
        for message in encoded:
            stream.receive(now, message)
        stream.close(now, cancelled=False)

    return run


def main(arguments: list[str], prog_name: str) -> None:
    """Measure and print the results; the only argument is --help."""
    _command(arguments, prog_name=prog_name)


@click.command()
def _command() -> None:
    """Compare the router's processing time with and without trace spans, and print the ratios."""
    limits = Limits()
    metrics = Metrics(version="0", replica_id="bench")
    tracing = Tracing(Nowhere(), replica_id="bench", version="0")
    observations, observations_traced = FanOut(), FanOut()
    metrics.subscribe(observations)
    for subscriber in (metrics, tracing):
        subscriber.subscribe(observations_traced)
    plain = Picker(limits, observations.report, id_prefix="p")
    traced = Picker(limits, observations_traced.report, id_prefix="t", observed_headers=TRACE_HEADERS)
    for picker in (plain, traced):
        picker.set_pools(0.0, [pool_of(MEMBERS, "dualmap")])
    kinds = {
        "not exported": conversation(plain, messages(""), limits),
        "not exported, traceparent in the request": conversation(plain, messages(SAMPLED), limits),
        "exported, the request's trace is not recorded": conversation(traced, messages(UNSAMPLED), limits),
        "exported, a span each": conversation(traced, messages(SAMPLED), limits),
    }
    times_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    now = 0.0
    for _ in range(ROUNDS):
        for kind, run in kinds.items():
            started = time.perf_counter()
            for _ in range(REQUESTS):
                now += 1.0
                run(now)
            times_us[kind].append((time.perf_counter() - started) / REQUESTS * 1e6)
    tracing.close()
    base_us = quantiles(times_us["not exported"], n=10)[0]
    click.echo("| spans | time, of a router that exports none |\n|---|---|")
    for kind, each in times_us.items():
        click.echo(f"| {kind} | {quantiles(each, n=10)[0] / base_us:.2f} |")
