"""Measures what a recording costs: CPU time per request with and without it, in turns within one run.

The bytes of Envoy's calls are replayed as in ``replay``, and an access log entry with usage ends each request. The
event loop's share is what the recording adds to a request there. Encoding, compressing and writing to a folder run in a
thread of the router; here they run after each round and are timed apart. Rounds alternate, and the tenth percentile
counts.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Final

import click
from bench.decisions import pool_of
from bench.gateway.prompts import MODEL
from bench.replay import KINDS, MEMBERS, Kind, Picking, reads, served

from dualmap.requests import Usage
from dualmap_extproc.recording.folder import RecordingFolder
from dualmap_extproc.recording.metrics import RecordingMetrics
from dualmap_extproc.recording.recorder import REQUEST_ID, Recorder
from dualmap_extproc.recording.writer import Batch, Description, Writer
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits

MAX_BYTES: Final = 10**9
USAGE: Final = Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=500)


class DirectWriter(Writer):
    """A writer that writes when it is asked to, so that its time is measured apart."""

    def put(self, batch: Batch) -> None:
        self.take(batch)


class RecordedPicking(Picking):
    """A picker and its subscribers, with a recorder among them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        opened = RecordingFolder(folder)
        opened.open()
        metrics = RecordingMetrics(self.observers.metrics.registry)
        description = Description(router="bench", program="bench", sample=1.0)
        writer = DirectWriter(opened, description, metrics, max_bytes=MAX_BYTES, hash_key=b"bench")
        self.recorder = Recorder(writer, sample=1.0, offset_s=lambda: 1.7e9)
        report = self.observers.observations.report
        self.recorder.subscribe(self.observers.observations)
        pool = pool_of(MEMBERS, "dualmap")
        headers = frozenset({REQUEST_ID})
        self.picker = Picker(Limits(), report, id_prefix="bench-0123abcd", observed_headers=headers)
        self.picker.set_pools(0.0, [replace(pool, model=replace(pool.model, name=MODEL))])


def loop_us(picking: Picking, calls: Sequence[Sequence[bytes]]) -> float:
    """Return the CPU time of one request on the event loop, with its end by the access log."""
    read = served(picking)
    clock = asyncio.get_running_loop().time
    spent_ns = 0
    for call in calls:
        started_ns = time.thread_time_ns()
        for data in call:
            read(data)
        (request_id,) = picking.picker._owners
        picking.picker.access_log(clock(), AccessLogEntry(request_id=request_id, status=200, usage=USAGE, total_s=1.0))
        spent_ns += time.thread_time_ns() - started_ns
    return spent_ns / len(calls) / 1000


def writing_us(picking: RecordedPicking, requests: int) -> float:
    """Return the CPU time to encode, compress and write one request."""
    now = asyncio.get_running_loop().time()
    started_ns = time.thread_time_ns()
    picking.recorder.tick(now)
    return (time.thread_time_ns() - started_ns) / requests / 1000


async def measure(rounds: int, folder: Path) -> None:
    """Print the table."""
    kinds = [kind for kind in KINDS if not kind.full_duplex]
    calls = {kind: list(reads(kind)) for kind in kinds}
    plain = {kind: Picking() for kind in kinds}
    recorded = {kind: RecordedPicking(folder / str(kind.body_kb)) for kind in kinds}
    times: dict[Kind, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            without, within = loop_us(plain[kind], calls[kind]), loop_us(recorded[kind], calls[kind])
            times[kind].append((without, within, writing_us(recorded[kind], len(calls[kind]))))
    click.echo("| request | us CPU on the event loop | with the recording | added | us CPU to write | share |")
    click.echo("|---|---|---|---|---|---|")
    for kind in kinds:
        without, within, writing = (quantiles(each, n=10)[0] for each in zip(*times[kind], strict=True))
        click.echo(
            f"| {kind.name} | {without:.1f} | {within:.1f} | {(within - without) / without:.1%} | {writing:.1f} "
            f"| {writing / without:.1%} |"
        )


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True, help="Rounds of each kind of request.")
def recording(rounds: int) -> None:
    """Compare the router's CPU time per request with and without a recording."""
    with TemporaryDirectory() as folder:
        asyncio.run(measure(rounds, Path(folder)))
