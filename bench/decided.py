"""Measures the latency and the owner's CPU time of a decision by the pool's owner in another process on loopback.

Both are real routers: a picker with its deadlines and, for the owner, its connections (``peers``). The latency starts
when the body of a request has arrived, and ends when the member is known. So it includes parsing the body and hashing
the prompt, but no gRPC from Envoy. Each request ends as soon as it is decided. No request waits for a free member.
Other rows have the latency of decisions by the router itself.

The CPU time of the owner is that for all messages of a request, which another router has read and hashed. Its inverse
is the rate of other routers' requests that fills the owner's CPU.

A router without an answer of the owner decides by itself after a while, and then for some time without asking. On a
busy machine this happens often. The rows contain these decisions, so the last column shows how many the owner answered.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from statistics import quantiles
from typing import Final

import grpc.aio
from bench.decisions import pool_of
from bench.gateway.load import cpu_s
from bench.picks import bodies

from dualmap.ownership.messages import Message
from dualmap.prompts.api import Api
from dualmap_extproc.errors import Refused
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.request.observations import FanOut, RemotelyDecided
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.deadlines import keep_deadlines

KEY: Final = b"benchmark of decisions"
SIZES_KB: Final = (4, 32, 220)
RATE: Final = 100
AT_ONCE: Final = 8
MEMBERS: Final = 8
POLICY: Final = "dualmap"


class Deciding:
    """A router. With ``peers``, it is one of several; the one that is warm owns the pool."""

    def __init__(self, name: str) -> None:
        self._observations = FanOut()
        self._observations.subscribe(RemotelyDecided, lambda each: self.results.update([each.result]))
        self.results = Counter[str]()
        """How the requests of a pool that another router owns were decided."""
        self.peers: Peers | None = None
        self._name = name
        self.picker = self._picker(shared=False)

    def connect(self, addresses: Collection[tuple[str, int]]) -> Peers:
        """Become one of several routers; return the connections."""

        async def find() -> Collection[tuple[str, int]]:
            return addresses

        self.picker = self._picker(shared=True)
        self.peers = Peers(self.picker, name=self._name, hash_key=KEY, find=find)
        return self.peers

    def _picker(self, *, shared: bool) -> Picker:
        send = self._send if shared else None
        picker = Picker(Limits(), self._observations.report, id_prefix=self._name, hash_key=KEY, send=send)
        picker.set_pools(asyncio.get_running_loop().time(), [pool_of(MEMBERS, POLICY)])
        return picker

    def _send(self, pool: str, peer: str, message: Message) -> None:
        if self.peers is not None:
            self.peers.send(pool, peer, message)

    async def decide(self, body: bytes) -> float:
        """Return the seconds until the member for a request is known; the request then ends."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Picked | Refused] = loop.create_future()
        began_s, now = time.perf_counter(), loop.time()
        answer = self.picker.pick(now, body, None, now, headers={}, resume=answered.set_result, api=Api.CHAT)
        if isinstance(answer, AnswerLater):
            answer = await answered
        seconds = time.perf_counter() - began_s
        assert isinstance(answer, Picked)
        self.picker.first_token(loop.time(), answer.request_id)
        self.picker.finished(loop.time(), answer.request_id, None)
        return seconds


async def own() -> None:
    """Own the pool and answer other routers until standard input ends; print the port."""
    router = Deciding("owner-0123abcd")
    peers = router.connect(())
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((peers.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tasks = [asyncio.create_task(each) for each in (peers.run(), keep_deadlines(router.picker))]
    peers.warm()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await peers.close()
    await server.stop(None)


async def decisions(pid: int, port: int, seconds: float) -> None:
    """Print the latencies of decisions by the router itself and through the owner, and the owner's CPU time.

    The owner is the process ``pid`` with this port.
    """
    alone, asking = Deciding("alone-0123abcd"), Deciding("asking-0123abcd")
    peers = asking.connect([("127.0.0.1", port)])
    tasks = [asyncio.create_task(each) for each in (peers.run(), *(keep_deadlines(r.picker) for r in (alone, asking)))]
    first = bodies(1000)[0][0].body
    while not asking.results["answered"]:
        await asking.decide(first)
        await asyncio.sleep(0.05)
    prompts = {size_kb: [each.body for each in bodies(1000 * size_kb)[0]] for size_kb in SIZES_KB}
    await _latencies(alone, asking, prompts, seconds)
    await _owner_cpu(asking, pid, prompts, seconds)
    for task in tasks:
        task.cancel()
    await peers.close()


async def _latencies(alone: Deciding, asking: Deciding, prompts: Mapping[int, Sequence[bytes]], seconds: float) -> None:
    print(f"\ndecisions of `{POLICY}` at {RATE}/s, {MEMBERS} members\n")
    print("| prompt | decided by | p50 ms | p99 ms | decisions | of them, the owner answered |")
    print("|---|---|---|---|---|---|")
    for size_kb, sent in prompts.items():
        for router, shown in ((alone, "the router itself"), (asking, "the owner in another process")):
            router.results.clear()
            times_s = await _at_rate(router, sent, seconds)
            cuts = quantiles(times_s, n=100)
            counts = f"{len(times_s)} | {router.results['answered'] if router is asking else '-'}"
            print(f"| {size_kb} KB | {shown} | {1000 * cuts[49]:.2f} | {1000 * cuts[98]:.2f} | {counts} |", flush=True)


async def _owner_cpu(asking: Deciding, pid: int, prompts: Mapping[int, Sequence[bytes]], seconds: float) -> None:
    print(f"\nthe owner's CPU time for requests of another router, `{POLICY}`, {MEMBERS} members\n")
    print("| prompt | requests | sent to the owner | us of the owner's CPU a request | requests/s that fill one CPU |")
    print("|---|---|---|---|---|")
    for size_kb, sent in prompts.items():
        for decide, shown in ((_at_rate, f"{RATE}/s"), (_at_once, f"{AT_ONCE} at once")):
            asking.results.clear()
            before_s = cpu_s(pid)
            await decide(asking, sent, seconds)
            # The owner also decides requests for which the other router did not wait.
            count = asking.results["answered"] + asking.results["timeout"]
            used_s = (cpu_s(pid) - before_s) / max(1, count)
            print(f"| {size_kb} KB | {shown} | {count} | {1e6 * used_s:.0f} | {1 / used_s:.0f} |", flush=True)


async def _at_once(router: Deciding, prompts: Sequence[bytes], seconds: float) -> list[float]:
    """Decide AT_ONCE requests at a time, and at least as many; return the seconds of each decision."""
    until_s, left, times_s = time.perf_counter() + seconds, cycle(prompts), list[float]()

    async def one_after_the_other() -> None:
        while True:
            times_s.append(await router.decide(next(left)))
            if time.perf_counter() >= until_s:
                return

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return times_s


async def _at_rate(router: Deciding, prompts: Sequence[bytes], seconds: float) -> list[float]:
    """Decide requests at the rate; return the seconds of each decision."""
    began_s, number = time.perf_counter(), 0
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body in cycle(prompts):
            if time.perf_counter() >= began_s + seconds:
                break
            tasks.append(group.create_task(router.decide(body)))
            number += 1
            await asyncio.sleep(max(0.0, began_s + number / RATE - time.perf_counter()))
    return [task.result() for task in tasks]
