"""Measures what KV events cost a router: CPU time, memory, and the delay from publication to the router's index.

Another process publishes with ZeroMQ as vLLM does. A message has a store of 50 blocks of 16 tokens and, as an engine
with a full cache sends them, 50 removals. Before, each member already holds 1 000 000 tokens, which no other member
holds. The router's process has sockets, decoding and ``PoolRouter.on_kv_events``, and no requests. Each row is measured
in a process of its own. If a row applies fewer blocks than are published, the router is too slow for them on this
machine. Then the delay is that of the queues, which grow until the publisher drops messages.
"""

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from random import Random
from statistics import quantiles

import click
import msgspec
import zmq
from bench.decisions import pool_of
from prometheus_client import CollectorRegistry

from dualmap.engines.events import Batch, Stored
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.profile import EngineProfile, EventSource
from dualmap.engines.residency import KvChange, Residency
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.engines.token_chain import pack_tokens
from dualmap.pools.pool import Engine, KvEvents, Member
from dualmap.router import PoolRouter
from dualmap_extproc.engines import kv_events
from dualmap_extproc.engines.event_messages import slices
from dualmap_extproc.engines.metrics import KvEventMetrics

RATES = ((8, 1000), (100, 200), (100, 1000))
"""Members, and stored blocks a second of each."""
SECONDS = 15.0
MESSAGE_BLOCKS = 50
ENGINE_BLOCK = 16
HELD_TOKENS = 1_000_000
VOCABULARY = 150_000
KEPT_MESSAGES = 20
"""A block is removed so many messages after its store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one number of members costs."""

    idle_cores: float
    cores: float
    blocks_a_second: float
    held_mb: float
    delays_ms: tuple[float, ...]


def token_ids(random: Random) -> msgspec.Raw:
    """Return the packed token ids of a store."""
    return msgspec.Raw(
        msgspec.msgpack.encode([random.randrange(VOCABULARY) for _ in range(MESSAGE_BLOCKS * ENGINE_BLOCK)])
    )


def message(tokens: msgspec.Raw, at: int, gone: int | None) -> bytes:
    """Return a message with a store of the hashes from ``at`` on, and the removal of the hashes from ``gone`` on."""
    store = {
        "type": "BlockStored",
        "block_hashes": list(range(at, at + MESSAGE_BLOCKS)),
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": ENGINE_BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * MESSAGE_BLOCKS,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    numbers = range(gone, gone + MESSAGE_BLOCKS) if gone is not None else ()
    removals = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0} for each in numbers]
    return msgspec.msgpack.encode([time.time(), [*removals, store], 0])


def publish(members: int, messages_a_second: float, ports: "multiprocessing.Queue[list[int]]", begin: Event) -> None:
    """Publish messages for each member until terminated. The first hash of a store is the time of its publication."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(members)]
    random = Random(1)
    # A prompt is stored again only after its removal.
    tokens = [[token_ids(random) for _ in range(KEPT_MESSAGES + 1)] for _ in sockets]
    ports.put([each.bind_to_random_port("tcp://127.0.0.1") for each in sockets])
    begin.wait()
    sent: list[list[int]] = [[] for _ in sockets]
    started_s = time.monotonic()
    number = 0
    while True:
        turn, member = divmod(number, members)
        due_s = started_s + (turn + member / members) / messages_a_second
        time.sleep(max(0.0, due_s - time.monotonic()))
        kept = sent[member]
        gone = kept.pop(0) if len(kept) == KEPT_MESSAGES else None
        kept.append(time.monotonic_ns())
        payload = message(tokens[member][turn % (KEPT_MESSAGES + 1)], kept[-1], gone)
        sockets[member].send_multipart([b"", turn.to_bytes(8, "big"), payload])
        number += 1


async def follow(members: int, rate: int) -> Measured:
    """Return the cost of following so many members that store ``rate`` blocks a second each."""
    messages_a_second = rate / MESSAGE_BLOCKS
    process = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[list[int]] = process.Queue()
    begin = process.Event()
    engines = process.Process(target=publish, args=(members, messages_a_second, ports, begin), daemon=True)
    engines.start()
    listening = await asyncio.to_thread(ports.get)
    events = KvEvents(enabled=True)
    pool = replace(
        pool_of(1, "dualmap"),
        engine=Engine(kv_events=events),
        members=tuple(Member(id=f"m-{n}", address="127.0.0.1", port=8000 + n) for n in range(members)),
    )
    router = PoolRouter(pool)
    gc.collect()
    before = resident_mb()
    for number in range(members):
        hold(router, f"m-{number}", Random(number))
    gc.collect()
    held_mb = resident_mb() - before
    delays: list[float] = []
    stored = 0

    def report(_pool: str, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        nonlocal stored
        # The first change of a source clears the member, which keeps what it held here.
        router.on_kv_events(member, rank, [each for each in changes if isinstance(each, Batch)], status)
        now = time.monotonic_ns()
        for change in changes:
            for event in change.events if isinstance(change, Batch) else ():
                if isinstance(event, Stored):
                    stored += len(event.hashes)
                    delays.append((now - event.hashes[0]) / 1e6)

    follows = kv_events.KvEvents(report, KvEventMetrics(CollectorRegistry()))
    task = asyncio.create_task(follows.run())
    follows.set_pools([pool])
    for member, port in zip(pool.members, listening, strict=True):
        source = EventSource(rank=0, port=port, replay_port=None, topic="")
        follows.on_profile(pool.id, member.id, EngineProfile(engine="vLLM", event_sources=(source,)))
    await asyncio.sleep(3.0)
    idle_cores, _ = await used(5.0)
    begin.set()
    # After this time the members' caches are full, and their engines remove blocks.
    await asyncio.sleep(KEPT_MESSAGES / messages_a_second + 2.0)
    delays.clear()
    stored = 0
    cores, passed_s = await used(SECONDS)
    measured = Measured(
        idle_cores=idle_cores,
        cores=cores,
        blocks_a_second=stored / passed_s / members,
        held_mb=held_mb,
        delays_ms=tuple(quantiles(delays, n=100)),
    )
    task.cancel()
    follows.close()
    engines.terminate()
    engines.join()
    return measured


def hold(router: PoolRouter, member: str, random: Random) -> None:
    """Let a member hold blocks of its own."""
    status = SourceStatus(state=SourceState.LIVE, sequence=0)
    blocks = 500
    for _ in range(HELD_TOKENS // ENGINE_BLOCK // blocks):
        tokens = pack_tokens([random.getrandbits(31) for _ in range(blocks * ENGINE_BLOCK)])
        hashes = tuple(random.getrandbits(62) for _ in range(blocks))
        store = Stored(hashes=hashes, parent=None, tokens=tokens, block_tokens=ENGINE_BLOCK)
        router.on_kv_events(member, 0, [Batch(events=(store,))], status)


async def used(seconds: float) -> tuple[float, float]:
    """Return the cores that this process uses for some time, and the time."""
    begun_s, at_s = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - at_s
    return (time.process_time() - begun_s) / passed_s, passed_s


def step_us() -> tuple[float, float]:
    """Return the CPU microseconds for a stored and removed block: to decode it, and to apply it."""
    random = Random(3)
    payloads = [message(token_ids(random), n * 100, (n - 5) * 100 if n > 5 else None) for n in range(200)]
    decoding, applying = [], []
    for _ in range(20):
        begun_s = time.process_time()
        batches = [list(slices(payload)) for payload in payloads]
        decoding.append(time.process_time() - begun_s)
        residency = Residency(HeldBlocks(), model="m")
        begun_s = time.process_time()
        for each in batches:
            for batch in each:
                assert isinstance(batch, Batch)
                residency.apply(0, batch)
        applying.append(time.process_time() - begun_s)
    blocks = len(payloads) * MESSAGE_BLOCKS
    return quantiles(decoding, n=10)[0] / blocks * 1e6, quantiles(applying, n=10)[0] / blocks * 1e6


def resident_mb() -> float:
    """Return the memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(members: int, rate: int) -> Measured:
    """Measure in this process."""
    return asyncio.run(follow(members, rate))


def main(arguments: list[str], prog_name: str) -> None:
    """Measure and print the results; the only argument is --help."""
    _command(arguments, prog_name=prog_name)


@click.command(help=__doc__)
def _command() -> None:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"machine: {os.cpu_count()} cores, load average {load} (times are comparable within this run only)\n")
    decoding, applying = step_us()
    print(f"one stored and one removed block: {decoding:.1f} us CPU to decode, {applying:.1f} us to apply\n")
    print("| members | blocks/s of each | applied | cores | cores, idle | MB of each | delay p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|---|")
    for members, rate in RATES:
        # A process for each measurement, so that memory which the last one has freed does not count.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
            found = executor.submit(measure, members, rate).result()
        print(
            f"| {members} | {rate} | {found.blocks_a_second:.0f} | {found.cores:.3f} | {found.idle_cores:.3f} "
            f"| {found.held_mb / members:.1f} | {found.delays_ms[49]:.1f} | {found.delays_ms[98]:.1f} |"
        )
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\nload average at the end: {load}")
