"""Tests ``dualmap engine-sim`` as a process: its ready line, its end, and its error messages."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession
from click.testing import CliRunner

from dualmap_sim.engine_server import engine_sim
from dualmap_sim.presets import PRESETS

Run = Callable[..., Awaitable[Process]]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    """Start ``dualmap engine-sim`` with arguments; kill the process after the test if it still runs."""
    started: list[Process] = []

    async def start(*arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dualmap_cli", "engine-sim", *arguments, stderr=PIPE, stdout=PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_of(process: Process) -> str:
    """Return ``host:port`` from the ready line."""
    assert process.stderr is not None
    line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
    ready = re.fullmatch(r"dualmap engine-sim ready http=(127\.0\.0\.1:\d+) model=qwen\n", line)
    assert ready, line
    return ready[1]


async def until_refused(address: str) -> None:
    """Wait until no process listens at an address."""
    host, port = address.split(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            writer.close()
            with suppress(OSError):  # the port may close before the server accepts this connection
                await writer.wait_closed()
            await asyncio.sleep(0.01)


async def test_engine_server_finishes_requests_and_rejects_new_on_sigterm(run: Run) -> None:
    process = await run("--port", "0", "--model", "qwen", "--preset", "7b", "--speed", "1")
    address = await address_of(process)
    async with ClientSession(f"http://{address}") as client:
        async with client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 40}) as response:
            await response.content.readany()
            process.terminate()
            await until_refused(address)
            rest = await response.read()
        with pytest.raises(ClientConnectorError):
            async with ClientSession(f"http://{address}") as late:
                await late.get("/health")

    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_idle_engine_server_stops_at_once_on_sigterm(run: Run) -> None:
    process = await run("--port", "0", "--model", "qwen")
    await address_of(process)

    process.terminate()

    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_engine_server_aborts_running_requests_on_second_sigterm(run: Run) -> None:
    process = await run("--port", "0", "--model", "qwen", "--speed", "0.0001")
    address = await address_of(process)
    async with (
        ClientSession(f"http://{address}") as client,
        client.post("/v1/chat/completions", json=CHAT) as response,
    ):
        process.terminate()
        await until_refused(address)
        assert process.returncode is None

        process.terminate()

        with pytest.raises(ClientError):
            await response.read()
    assert await asyncio.wait_for(process.wait(), 30) == 1


async def test_engine_server_with_port_in_use_exits_with_a_short_error(run: Run) -> None:
    first = await run("--port", "0", "--model", "qwen")
    port = (await address_of(first)).split(":")[1]

    second = await run("--port", port)
    _, words = await asyncio.wait_for(second.communicate(), 60)

    assert second.returncode == 1
    assert words.startswith(f"dualmap engine-sim: cannot listen on 127.0.0.1:{port}: ".encode())
    assert b"Traceback" not in words


async def test_engine_server_with_kv_events_prints_their_addresses(run: Run) -> None:
    events = ("--kv-events", "--kv-events-port", "0", "--kv-events-replay-port", "0")
    first = await run("--port", "0", "--model", "qwen", *events)
    assert first.stderr is not None
    line = (await asyncio.wait_for(first.stderr.readline(), 60)).decode()
    ready = re.fullmatch(
        r"dualmap engine-sim ready http=\S+ model=qwen kv_events=tcp://127\.0\.0\.1:(\d+) kv_replay=tcp://\S+:\d+\n",
        line,
    )
    assert ready, line

    second = await run("--port", "0", "--kv-events", "--kv-events-port", ready[1], "--kv-events-replay-port", "0")
    _, words = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode == 1
    assert words.startswith(f"dualmap engine-sim: cannot publish KV events on tcp://127.0.0.1:{ready[1]}: ".encode())
    first.terminate()
    assert await asyncio.wait_for(first.wait(), 60) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "70b"], "'70b' is not one of '7b', '14b', 'pd', 'agent'"),
        (["--speed", "0"], "'--speed': 0.0 is not in the range 0.0001<=x<=10000"),
        (["--speed", "nan"], "'--speed': nan is not in the range 0.0001<=x<=10000"),
        (["--speed", "inf"], "'--speed': inf is not in the range 0.0001<=x<=10000"),
        (["--model", ""], "'--model': '' is not accepted; give at least one character"),
        (["--model", " "], "'--model': ' ' is not accepted; give at least one character"),
        (["--cache-tokens", "-1"], "-1 is not in the range x>=0"),
        (["--port", "70000"], "70000 is not in the range 0<=x<=65535"),
        (["--kv-events", "--cache-tokens", "31"], "--kv-events needs a prefix cache; give --cache-tokens at least 32"),
        (["--kv-events-port", "70000"], "70000 is not in the range 0<=x<=65535"),
        (["--kv-events-encoding", "json"], "'json' is not one of 'map', 'array'"),
        (["--kv-events-replay-port", "65535", "--data-parallel-rank", "1"], "port 65535 plus rank 1 is above 65535"),
    ],
)
def test_engine_server_invalid_option_error_has_accepted_values(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(engine_sim, arguments)

    assert result.exit_code == 2
    assert words in result.stderr


def test_engine_server_help_lists_prompt_limit_of_each_preset() -> None:
    words = " ".join(CliRunner().invoke(engine_sim, ["--help"]).stdout.split())

    for name, config in PRESETS.items():
        assert re.search(rf"\b{config.input_tokens_max}( tokens)? with (the presets )?[^,]*\b{name}\b", words), name
