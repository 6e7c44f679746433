"""Measures the CPU time that a router spends on its members' engines: the client, the readers and the pool's router.

The engines are one other process, which answers with a page of vLLM's size. CPU time is that of this process only, so
other programs on the machine influence the figures less than a clock. As in ``decisions``, the tenth percentile of the
rounds counts.
"""

import asyncio
import multiprocessing
import time
from dataclasses import replace
from statistics import quantiles

import aiohttp
import click
from bench.decisions import pool_of

from dualmap.engines.profile import EngineProfile, read_metrics
from dualmap.pools.pool import Member
from dualmap.router import PoolRouter
from dualmap_extproc.engines.client import TIMEOUT_S, EngineClient, Kind
from dualmap_extproc.engines.profiles import EngineProfiles

SCRAPES = 50
ROUNDS = 100
MEMBERS = (10, 100)
SECONDS = 10.0
BYTES = 59_338
"""The size of a page of vLLM 0.32.0 after some requests, which has 716 lines."""
_LOAD = (
    'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
    'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0\n'
    'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0\n'
    'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0\n'
)
_CACHE = ",".join(f'setting_{n}="None"' for n in range(36)) + ',block_size="16",num_gpu_blocks="28000"'
_DOCUMENT = b'{"version": "0.32.0", "data": [{"id": "m", "max_model_len": 131072}]}'
_BUCKET = 'vllm:e2e_request_latency_seconds_bucket{engine="0",le="%d.0",model_name="m"} 0.0\n'


def page() -> bytes:
    """Return a metrics page with the lines of a real one that are read, and histograms up to the real size."""
    head = f"process_start_time_seconds 1.795e+09\n{_LOAD}"
    tail = f"vllm:cache_config_info{{{_CACHE}}} 1.0\n"
    buckets = ""
    while len(head) + len(buckets) + len(tail) < BYTES:
        buckets += _BUCKET % len(buckets)
    return (head + buckets + tail).encode()


class _Engine(asyncio.Protocol):
    """Answers each request on a connection with the metrics page, or with a short document for other paths."""

    def __init__(self, page: bytes, document: bytes) -> None:
        self._page, self._document = page, document

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._page if data.startswith(b"GET /metrics ") else self._document)


def serve(ports: "multiprocessing.Queue[int]") -> None:
    """Serve the answers on a free loopback port until terminated."""

    async def run() -> None:
        answers = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(each) + each for each in (page(), _DOCUMENT)]
        server = await asyncio.get_running_loop().create_server(lambda: _Engine(*answers), "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def scrape_ms(port: int) -> tuple[float, float]:
    """Return the CPU milliseconds of one scrape, and those of reading its page."""
    member, content = Member(id="m-0", address="127.0.0.1", port=port), page()
    connection = EngineClient().connect(member)
    router = PoolRouter(replace(pool_of(1, "dualmap"), members=(member,)))
    whole, reading = [], []
    for at in range(ROUNDS):
        begun_s = time.process_time()
        for n in range(SCRAPES):
            profile = read_metrics("vLLM", await connection.page("/metrics", Kind.LOAD))
            router.on_profile(at * SCRAPES + n, "m-0", EngineProfile(engine="vLLM").also(profile))
        whole.append((time.process_time() - begun_s) / SCRAPES * 1000)
        begun_s = time.process_time()
        for _ in range(SCRAPES):
            read_metrics("vLLM", content)
        reading.append((time.process_time() - begun_s) / SCRAPES * 1000)
    connection.close()
    return quantiles(whole, n=10)[0], quantiles(reading, n=10)[0]


async def requests_ms(port: int) -> tuple[float, float]:
    """Return the CPU milliseconds of one request for the page by the router's client, and by aiohttp's."""
    connection = EngineClient().connect(Member(id="m-0", address="127.0.0.1", port=port))
    own, general = [], []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False) as session:
        for _ in range(ROUNDS):
            begun_s = time.process_time()
            for _ in range(SCRAPES):
                await connection.page("/metrics", Kind.LOAD)
            own.append((time.process_time() - begun_s) / SCRAPES * 1000)
            begun_s = time.process_time()
            for _ in range(SCRAPES):
                async with asyncio.timeout(TIMEOUT_S), session.get("/metrics") as response:
                    await response.read()
            general.append((time.process_time() - begun_s) / SCRAPES * 1000)
    connection.close()
    return quantiles(own, n=10)[0], quantiles(general, n=10)[0]


async def cores(port: int, members: int) -> tuple[float, float]:
    """Return the cores that discovery uses with so many members, and the profiles per second."""
    engines_of = tuple(Member(id=f"m-{n}", address="127.0.0.1", port=port) for n in range(members))
    router = PoolRouter(replace(pool_of(1, "dualmap"), members=engines_of))
    reports = 0

    def take(_pool: str, member: str, profile: EngineProfile) -> None:
        nonlocal reports
        reports += 1
        router.on_profile(time.monotonic(), member, profile)

    engines = EngineProfiles(take)
    engines.set_pools([router.pool])
    await asyncio.sleep(3.0)
    begun_s, before, at_s = time.process_time(), reports, time.monotonic()
    await asyncio.sleep(SECONDS)
    used_s, passed_s = time.process_time() - begun_s, time.monotonic() - at_s
    await engines.close()
    return used_s / passed_s, (reports - before) / passed_s


def main(arguments: list[str], prog_name: str) -> None:
    """Measure and print the results; the only argument is --help."""
    _command(arguments, prog_name=prog_name)


@click.command(help=__doc__)
def _command() -> None:
    context = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = context.Queue()
    engine = context.Process(target=serve, args=(ports,), daemon=True)
    engine.start()
    try:
        port = ports.get()
        whole, reading = asyncio.run(scrape_ms(port))
        own, general = asyncio.run(requests_ms(port))
        print(f"one scrape of a page of {BYTES} bytes: {whole:.3f} ms CPU, of it {reading:.3f} ms to read the page")
        print(f"one request for the page: {own:.3f} ms CPU; with aiohttp's client: {general:.3f} ms\n")
        print("| members | profiles/s | cores |")
        print("|---|---|---|")
        for members in MEMBERS:
            used, rate = asyncio.run(cores(port, members))
            print(f"| {members} | {rate:.0f} | {used:.3f} |")
    finally:
        engine.terminate()
        engine.join()
