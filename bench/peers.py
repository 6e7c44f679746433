"""Measures the messages between two routers, in two processes on loopback (make bench ARGS="peers").

One router asks questions as for a request, and the other one answers each of them with the same decision: the policy
takes no part. Round trips include the event loops of both processes, gRPC and the codec. CPU times are per message, of
the process that sends the question and receives the answer, so each question costs two of them there.

A request that another router decides costs four messages: question, answer, first token and end. A table puts them
beside the updates by which four routers that decide by themselves replicate their state. The last two have the latency
of decisions by the router itself and through the owner, and the CPU time of the owner (``decided``).
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Final

import click
import grpc.aio
from bench.decided import decisions, own
from bench.replicas import NOTHING_COUNTED
from bench.virtual import pool_of

from dualmap.ownership.messages import Answer, Ask, Message, Progress, Step
from dualmap.pools.pool import Routing
from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import CandidateReceipt, Key, Receipt
from dualmap.replicas.update import ReplicaUpdate
from dualmap.requests import Decision, Request, Usage
from dualmap.router import PoolRouter
from dualmap_extproc.peers.codec import decode_frame, encode_message
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.store.codec import decode_update, encode_update
from dualmap_extproc.store.exchange import INTERVAL_S
from dualmap_extproc.store.unsent import Unsent
from dualmap_sim.option_checks import FiniteFloatRange

POOL = "llm/chat"
KEY = b"benchmark of messages"
PROMPT_TOKENS = (1_000, 8_000, 55_000)
BLOCK_TOKENS = 128
RATES = (100, 1000)
REQUEST_TOKENS = 8_000
REQUEST_RATE = 100
REPLICATED_ROUTERS = 4
REPLICATED_RATES = (1, 10)
"""Requests per second of each router, for the updates of routers that decide by themselves."""
REPLICATED_S = 20
ANSWER_S = 0.05
ENDPOINT = "10.0.0.1:8000"


class Echo:
    """Answers each question with a decision."""

    peers: Peers

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        if isinstance(message, Ask):
            self.peers.send(pool, peer, answer(message.request.id))

    def on_routers(self, now: float, routers: Collection[str]) -> None:
        pass

    def on_router_lost(self, now: float, peer: str) -> None:
        pass

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        pass

    def on_orphan(self, now: float, entry: AccessLogEntry) -> None:
        pass


class Asking(Echo):
    """Takes the time of each answer. With ``reports``, it reports each request's first token and end, too."""

    def __init__(self) -> None:
        self.reports = False
        self.asked_s: dict[str, float] = {}
        self.seconds: list[float] = []
        self.answered = asyncio.Event()

    def ask(self, request: Request) -> None:
        self.asked_s[request.id] = time.perf_counter()
        self.peers.send(POOL, self.peers.names[0], Ask(request=request, age_s=0.0))

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        assert isinstance(message, Answer)
        self.seconds.append(time.perf_counter() - self.asked_s.pop(message.outcome.request_id))
        self.answered.set()
        if self.reports:
            loop = asyncio.get_running_loop()
            for number, report in enumerate(progress(message.outcome.request_id), start=1):
                loop.call_later(number * ANSWER_S, self.peers.send, POOL, peer, report)


def question(tokens: int, number: int) -> Request:
    hashes = tuple((tokens << 40) + (number << 20) + block << 8 for block in range(-(-tokens // BLOCK_TOKENS)))
    chain = BlockChain(hashes=hashes, block_tokens=BLOCK_TOKENS, tokens=tokens)
    return Request(id=f"asking-0123abcd-{number}-0123456789abcdef", chain=chain, arrived_s=0.0, model="m")


def answer(request_id: str) -> Answer:
    receipt = Receipt(
        pool=POOL,
        policy="dualmap",
        rule="slo holds at both",
        reason="both members meet the SLO, and this one caches more of the prompt",
        key=Key(hash=2**63 + 1, blocks=4, tokens=512),
        pair=("chat-0", "chat-1"),
        chosen="chat-0",
        address=ENDPOINT,
        prompt_tokens=8000,
        matched_tokens=4096,
        predicted_ttft_s=0.5,
        candidates=tuple(
            CandidateReceipt(
                id=f"chat-{n}", state="active", matched_tokens=4096, pending_tokens=9000, in_flight=3, ttft_s=0.5
            )
            for n in range(2)
        ),
    )
    return Answer(outcome=Decision(request_id=request_id, endpoints=(ENDPOINT, "10.0.0.2:8000"), receipt=receipt))


def progress(request_id: str) -> tuple[Progress, Progress]:
    """Return the reports of a request's first token and of its end."""
    usage = Usage(prompt_tokens=REQUEST_TOKENS, completion_tokens=200, cached_tokens=4096)
    return (
        Progress(request_id=request_id, step=Step.FIRST_TOKEN),
        Progress(request_id=request_id, step=Step.FINISHED, usage=usage),
    )


async def answering() -> None:
    """Answer questions until standard input ends; print the port."""
    echo = Echo()
    server = grpc.aio.server()
    echo.peers = Peers(echo, name="answering-0123abcd", hash_key=KEY, find=_nowhere)
    server.add_generic_rpc_handlers((echo.peers.handler(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await echo.peers.close()
    await server.stop(None)


async def _nowhere() -> Collection[tuple[str, int]]:
    return ()


async def measure(port: int, seconds: float) -> None:
    asking = Asking()

    async def find() -> Collection[tuple[str, int]]:
        return [("127.0.0.1", port)]

    asking.peers = Peers(asking, name="asking-0123abcd", hash_key=KEY, find=find)
    running = asyncio.create_task(asking.peers.run())
    while not asking.peers.names:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    began_s = time.process_time()
    await asyncio.sleep(2 * seconds)
    print(f"a connection without messages: {50 * (time.process_time() - began_s) / seconds:.2f} % of a core\n")
    print("| prompt tokens | questions | p50 ms | p99 ms | us CPU a message |")
    print("|---|---|---|---|---|")
    for tokens in PROMPT_TOKENS:
        await rounds(asking, tokens, "one after the other", seconds, _in_turn)
        for rate in RATES:
            await rounds(asking, tokens, f"{rate}/s", seconds, _at_rate(rate))
        await rounds(asking, tokens, "64 at once", seconds, _at_once)
    asking.reports = True
    began_s, until_s = time.process_time(), time.perf_counter() + 2 * seconds
    asking.seconds.clear()
    await _at_rate(REQUEST_RATE)(asking, REQUEST_TOKENS, until_s)
    await asyncio.sleep(3 * ANSWER_S)
    cpu_us = 1e6 * (time.process_time() - began_s) / len(asking.seconds)
    print(f"\na request of {REQUEST_TOKENS} tokens at {REQUEST_RATE}/s, with all four messages: {cpu_us:.0f} us of CPU")
    running.cancel()
    await asking.peers.close()


async def rounds(
    asking: Asking, tokens: int, shown: str, seconds: float, ask: Callable[[Asking, int, float], object]
) -> None:
    asking.seconds.clear()
    began_s, until_s = time.process_time(), time.perf_counter() + seconds
    await ask(asking, tokens, until_s)
    cpu_us = 1e6 * (time.process_time() - began_s) / (2 * len(asking.seconds))
    cuts = quantiles(asking.seconds, n=100)
    print(f"| {tokens} | {shown} | {1000 * cuts[49]:.2f} | {1000 * cuts[98]:.2f} | {cpu_us:.0f} |", flush=True)


async def _in_turn(asking: Asking, tokens: int, until_s: float) -> None:
    number = 0
    while time.perf_counter() < until_s:
        asking.answered.clear()
        asking.ask(question(tokens, number))
        await asking.answered.wait()
        number += 1


async def _at_once(asking: Asking, tokens: int, until_s: float) -> None:
    while time.perf_counter() < until_s:
        for number in range(64):
            asking.ask(question(tokens, number))
        await _all_answered(asking)


def _at_rate(rate: int) -> Callable[[Asking, int, float], object]:
    async def ask(asking: Asking, tokens: int, until_s: float) -> None:
        number, began_s = 0, time.perf_counter()
        while time.perf_counter() < until_s:
            asking.ask(question(tokens, number))
            number += 1
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
        await _all_answered(asking)

    return ask


async def _all_answered(asking: Asking) -> None:
    while asking.asked_s:
        asking.answered.clear()
        await asking.answered.wait()


def codec() -> None:
    """Print the time to encode and decode a message."""
    print("| message | bytes | us to encode | us to decode |")
    print("|---|---|---|---|")
    asks = [(f"question, {tokens} tokens", Ask(request=question(tokens, 7), age_s=0.0)) for tokens in PROMPT_TOKENS]
    for name, message in (*asks, ("answer", answer("asking-0123abcd-7-0123456789abcdef"))):
        frame = encode_message(POOL, message)
        encode_us, decode_us = (
            _us(lambda told=message: encode_message(POOL, told)),
            _us(lambda of=frame: decode_frame(of)),
        )
        print(f"| {name} | {len(frame)} | {encode_us:.0f} | {decode_us:.0f} |")
    print()


def requests() -> None:
    """Print the bytes and codec time of a request that the owner decides, and of one in replication updates."""
    print(f"| a request of {REQUEST_TOKENS} tokens | bytes written | bytes read | us to encode and decode |")
    print("|---|---|---|---|")
    asked = question(REQUEST_TOKENS, 7)
    messages = (Ask(request=asked, age_s=0.0), answer(asked.id), *progress(asked.id))
    frames = [encode_message(POOL, message) for message in messages]
    owned_us = sum(
        _us(lambda told=message: encode_message(POOL, told)) + _us(lambda of=frame: decode_frame(of))
        for message, frame in zip(messages, frames, strict=True)
    )
    owned = sum(len(frame) for frame in frames)
    print(f"| another router decides: four messages | {owned} | {owned} | {owned_us:.0f} |")
    others = REPLICATED_ROUTERS - 1
    for rate in REPLICATED_RATES:
        updates = replicated(rate)
        written = [encode_update(update) for update in updates]
        per_request = 1 / (rate * REPLICATED_S)
        encode_us = _us(lambda told=updates: [encode_update(each) for each in told], repeats=2)
        decode_us = _us(lambda of=written: [decode_update(each) for each in of], repeats=2)
        written_bytes = per_request * sum(len(each) for each in written)
        cpu_us = per_request * (encode_us + others * decode_us)
        name = f"{REPLICATED_ROUTERS} routers decide by themselves, {rate}/s each: replication updates"
        print(f"| {name} | {written_bytes:.0f} | {others * written_bytes:.0f} | {cpu_us:.0f} |")
    print()


def replicated(rate: int) -> list[ReplicaUpdate]:
    """Return the updates that a router writes during ``REPLICATED_S`` seconds with ``rate`` requests per second."""
    router, unsent = PoolRouter(pool_of(Routing()), replicated=True), Unsent()
    updates = []
    sent = 0
    for turn in range(round(REPLICATED_S / INTERVAL_S)):
        now = turn * INTERVAL_S
        while sent <= now * rate:
            asked = question(REQUEST_TOKENS, sent)._replace(arrived_s=now)
            router.on_request(now, asked)
            if sent:
                router.on_first_token(now, question(REQUEST_TOKENS, sent - 1).id)
                router.on_finished(now, question(REQUEST_TOKENS, sent - 1).id)
            sent += 1
        unsent.add(now, router.take_update(now))
        update, loads = unsent.update(now), unsent.loads(now)
        if update is not None or loads is not None:
            updates.append(replace(update or ReplicaUpdate(hotness=NOTHING_COUNTED), loads=loads))
            unsent.sent_update()
        if loads is not None:
            unsent.sent_loads(now, dict(loads))
    return updates


def _us(work: Callable[[], object], *, repeats: int = 200) -> float:
    """Return the time of ``work`` without disturbance, in microseconds."""
    taken = []
    for _ in range(20):
        began_s = time.thread_time()
        for _ in range(repeats):
            work()
        taken.append(time.thread_time() - began_s)
    return 1e6 * min(taken) / repeats


_OTHERS: Final = {"answering": answering, "owner": own}
"""What the other process runs."""


@click.command()
@click.option(
    "--seconds", type=FiniteFloatRange(0.1, 600.0), default=2.0, show_default=True, help="Time of each measurement."
)
@click.option("--as", "role", type=click.Choice(tuple(_OTHERS)), hidden=True)
def main(seconds: float, role: str | None) -> None:
    """Measure the messages between two routers on loopback, and decisions by the pool's owner."""
    if role is not None:
        asyncio.run(_OTHERS[role]())
        return
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"peers: {os.cpu_count()} cores, load average {load}\n")
    codec()
    requests()
    with _other("answering") as (_, port):
        asyncio.run(measure(port, seconds))
    with _other("owner") as (pid, port):
        asyncio.run(decisions(pid, port, seconds))


@contextmanager
def _other(role: str) -> Iterator[tuple[int, int]]:
    """Run the other process while the context is open; yield its process id and its port."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench", "peers", "--as", role],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate()
