"""The client process: a closed loop, or an open loop with requests at fixed times, independent of earlier answers.

``python -m bench.gateway.load`` prints a port. Each line received on the port is a ``Job`` in JSON; the answer is a
``Result``. The process writes raw HTTP/1.1 on asyncio protocols. A request of 1 KB costs 20 to 50 us, half of Envoy's
own cost (``load`` in ``Result.cpu_s``). A client library would cost several times as much as Envoy. The client process
itself reads the CPU clocks of the measured processes at both ends of the window. So no messages between processes delay
the readings.

In an open loop, a request's times count from its due time, not from the moment when a connection is free. So a stall
appears in every request that it delayed (coordinated omission).
"""

import asyncio
import dataclasses
import json
import os
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from bench.gateway.prompts import bodies

_DRAIN_S = 10.0
_CONNECTIONS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement. ``rate`` is requests per second, or 0 for a closed loop of ``connections``.

    The window of ``seconds`` begins after ``ramp_s``. ``chunks`` is the number of events in an answer, or 0 for a JSON
    answer. ``first`` is the number of the first conversation. ``pids`` are the processes to measure, by name.
    """

    port: int
    connections: int
    rate: float
    seconds: float
    ramp_s: float
    prompt_bytes: int
    chunks: int
    first: int
    pids: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results within the window.

    Times are in ms until the first byte of the body. ``sent`` includes the requests of the ramp.
    """

    requests: int
    sent: int
    errors: int
    seconds: float
    cpu_s: Mapping[str, float]
    ttfb_p50_ms: float
    ttfb_p90_ms: float
    ttfb_p99_ms: float


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used, in user and kernel mode.

    The clock's resolution is a nanosecond; that of /proc/PID/stat is 10 ms. Linux derives the clock id from the process
    id (posix-timers.h, MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED).
    """
    return time.clock_gettime((~pid << 3) | 2)


class _Connection(asyncio.Protocol):
    """One keep-alive connection and its current request."""

    def __init__(self, clients: "_Clients") -> None:
        self._clients = clients
        self._transport: asyncio.Transport
        self._head = b""
        self._left_bytes: int | None = None
        self._in_body = False
        self.due_s = 0.0
        self.first_byte_s = 0.0
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, due_s: float, request: list[bytes]) -> None:
        """Send a request that was due at ``due_s``."""
        self.due_s, self.first_byte_s, self.status = due_s, 0.0, b""
        self._head, self._in_body, self._left_bytes = b"", False, None
        self._transport.writelines(request)

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._in_body = True
            self.status = head[9:12]
            length = head.lower().find(b"\r\ncontent-length: ")
            if length >= 0:
                self._left_bytes = int(head[length + 18 :].split(b"\r\n", 1)[0])
        if data and not self.first_byte_s:
            self.first_byte_s = time.perf_counter()
        if self._left_bytes is None:
            ended = data.endswith(b"0\r\n\r\n")
        else:
            self._left_bytes -= len(data)
            ended = self._left_bytes <= 0
        if ended:
            self._clients.ended(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.lost(self)

    def close(self) -> None:
        self._transport.abort()


class _Clients:
    """All connections of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._bodies = bodies(job.prompt_bytes, streamed=job.chunks > 0, first=job.first)
        self._head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nx-bench-chunks: %d\r\n\r\n" % (job.prompt_bytes, job.chunks)
        )
        self._connections: list[_Connection] = []
        self._idle: list[_Connection] = []
        self._waiting: deque[float] = deque()
        self._began_s = self._ends_s = float("inf")
        self._open = 0
        self._closing = False
        self._all_ended = asyncio.Event()
        self.sent = self.requests = self.errors = 0
        self.ttfb_s: list[float] = []

    async def run(self) -> Result:
        job = self._job
        for _ in range(job.connections):
            await self._connect()
        start_s = time.perf_counter()
        self._began_s = start_s + job.ramp_s
        self._ends_s = self._began_s + job.seconds
        if job.rate:
            ticking = asyncio.create_task(self._keep_time(start_s))
        else:
            ticking = None
            for connection in self._idle:
                self._send(connection, time.perf_counter())
            self._idle.clear()
        await asyncio.sleep(self._began_s - time.perf_counter())
        before, began_s = self._clocks(), time.perf_counter()
        done = self.requests
        await asyncio.sleep(self._ends_s - time.perf_counter())
        after, seconds = self._clocks(), time.perf_counter() - began_s
        requests = self.requests - done
        if ticking is not None:
            await ticking
        await self._drain()
        return Result(
            requests=requests,
            sent=self.sent,
            errors=self.errors,
            seconds=seconds,
            cpu_s={name: after[name] - before[name] for name in after},
            ttfb_p50_ms=quantile(self.ttfb_s, 0.5) * 1e3,
            ttfb_p90_ms=quantile(self.ttfb_s, 0.9) * 1e3,
            ttfb_p99_ms=quantile(self.ttfb_s, 0.99) * 1e3,
        )

    def ended(self, connection: _Connection) -> None:
        """Record a complete answer, and send the next request."""
        self._open -= 1
        if connection.status == b"200":
            self.requests += 1
        else:
            self.errors += 1
        if self._began_s <= connection.due_s < self._ends_s:
            self.ttfb_s.append(connection.first_byte_s - connection.due_s)
        if not self._job.rate and time.perf_counter() < self._ends_s:
            self._send(connection, time.perf_counter())
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)
            if not self._open:
                self._all_ended.set()

    def lost(self, connection: _Connection) -> None:
        """Count a connection that Envoy closed as an error; its request never ends."""
        if not self._closing:
            self.errors += 1

    async def _keep_time(self, start_s: float) -> None:
        every_s = 1 / self._job.rate
        due_s = start_s
        while due_s < self._ends_s:
            await asyncio.sleep(due_s - time.perf_counter())
            if not self._idle and len(self._connections) < _CONNECTIONS_MAX:
                await self._connect()
            if self._idle:
                self._send(self._idle.pop(), due_s)
            else:
                self._waiting.append(due_s)
            due_s += every_s

    async def _connect(self) -> None:
        _, connection = await self._loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._job.port)
        self._connections.append(connection)
        self._idle.append(connection)

    def _send(self, connection: _Connection, due_s: float) -> None:
        self._open += 1
        self.sent += 1
        self._all_ended.clear()
        connection.send(due_s, [self._head, *next(self._bodies)])

    async def _drain(self) -> None:
        """Wait for the outstanding answers; missing answers count as errors."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while self._open:
                    await self._all_ended.wait()
        except TimeoutError:
            self.errors += self._open
        self._closing = True
        for connection in self._connections:
            connection.close()

    def _clocks(self) -> dict[str, float]:
        return {"load": cpu_s(os.getpid())} | {name: cpu_s(pid) for name, pid in self._job.pids.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed; NaN without values."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        result = await _Clients(Job(**json.loads(line))).run()
        writer.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")
        await writer.drain()
    writer.close()


async def main() -> None:
    """Serve jobs until the process is killed."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(f"dualmap bench-load ready control=127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    # epoll has timeouts in milliseconds, select in microseconds. A delay of a millisecond would distort the measured
    # times.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(main())
