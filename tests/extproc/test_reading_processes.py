"""The processes that read large bodies: results, replacement, limits, and their end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Prompt, Rendered
from dualmap_extproc.errors import Refused
from dualmap_extproc.reading import processes, worker
from dualmap_extproc.reading.processes import PROCESSES, WAITING_MAX, ReadingProcesses
from dualmap_extproc.reading.worker import Templates
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.reading import Bounds, LargeBody, encode_body
from dualmap_extproc.tokens.rendering import PromptTexts
from extproc.envoy_messages import chat
from extproc.tokenizer_files import write_tokenizer
from waiting import until

BOUNDS = {"m": Bounds(body_bytes=16 * 1024 * 1024, tokens=10**6)}


def large(body: bytes, tokenizer: str = "") -> LargeBody:
    chunks = tuple(body[start : start + 65_536] for start in range(0, len(body), 65_536))
    bounds = {name: each._replace(tokenizer=tokenizer) for name, each in BOUNDS.items()}
    return LargeBody(chunks=chunks, api=Api.CHAT, bounds=bounds)


@asynccontextmanager
async def running(**seconds: float) -> AsyncIterator[ReadingProcesses]:
    reader = ReadingProcesses(**seconds)
    task = asyncio.create_task(reader.run())
    try:
        await until(lambda: len(reader.pids) == PROCESSES)
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def reading(reader: ReadingProcesses, body: bytes, tokenizer: str = "") -> Awaitable[Prompt | Refused]:
    future: asyncio.Future[Prompt | Refused] = asyncio.get_running_loop().create_future()
    cancel = reader.read(large(body, tokenizer), lambda now, result: future.set_result(result))
    assert cancel is not None
    return future


def code(result: Prompt | Refused) -> str:
    assert isinstance(result, Refused)
    return result.code


def stop(reader: ReadingProcesses) -> None:
    """Stop the processes as if they never came to an end of a body."""
    for pid in reader.pids:
        os.kill(pid, signal.SIGSTOP)


async def test_process_reads_bodies_as_the_router_does():
    bodies = [chat("text, " * 100_000 + str(n)) for n in range(5)] + [b"no JSON, " * 100_000]
    async with running() as reader:
        results = await asyncio.gather(*(reading(reader, body) for body in bodies))

    assert results == [read_body(body, Api.CHAT) for body in bodies]


async def test_process_that_is_killed_is_replaced_for_the_next_body():
    async with running() as reader:
        before = reader.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        results = [await reading(reader, chat()) for _ in range(3)]

        assert results == [read_body(chat(), Api.CHAT)] * 3
        assert not set(before) & set(reader.pids[:1])


async def test_process_that_is_killed_while_it_reads_reads_the_body_again():
    async with running() as reader:
        stop(reader)
        result = asyncio.ensure_future(reading(reader, chat()))
        await asyncio.sleep(0.1)
        for pid in reader.pids:
            os.kill(pid, signal.SIGKILL)

        assert await result == read_body(chat(), Api.CHAT)


async def test_process_that_takes_too_long_is_replaced_and_its_body_refused():
    async with running(read_s=1.0) as reader:
        stop(reader)
        result = await reading(reader, chat())
        os.kill(reader.pids[0], signal.SIGCONT)

        assert code(result) == "invalid_request"
    async with running(read_s=60.0) as reader:
        assert await reading(reader, chat()) == read_body(chat(), Api.CHAT)


async def test_process_with_an_unread_result_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = processes._exchange

    async def unread(process: asyncio.subprocess.Process, body: LargeBody) -> Prompt | Refused:
        """Send the body, and leave the result in the pipe and in the stream's buffer."""
        assert process.stdin is not None
        process.stdin.write(encode_body(body))
        for chunk in body.chunks:
            process.stdin.write(chunk)
        await process.stdin.drain()
        await asyncio.Event().wait()
        return await exchange(process, body)

    monkeypatch.setattr(processes, "_exchange", unread)
    async with running(read_s=4.0) as reader, asyncio.timeout(60.0):
        assert code(await reading(reader, chat("x" * 2_000_000))) == "invalid_request"
        monkeypatch.setattr(processes, "_exchange", exchange)
        prompts = await asyncio.gather(*(reading(reader, chat("x" * 600_000)) for _ in range(PROCESSES)))
        assert all(isinstance(prompt, Prompt) for prompt in prompts)


async def test_body_that_waits_too_long_is_refused_as_overloaded():
    async with running(wait_s=0.2) as reader:
        stop(reader)
        busy = [reading(reader, chat()) for _ in range(PROCESSES)]
        await asyncio.sleep(0.05)

        assert code(await reading(reader, chat())) == "overloaded"
        assert len(busy) == PROCESSES


async def test_bodies_above_the_most_that_may_wait_are_not_taken():
    async with running() as reader:
        stop(reader)
        taken = [reader.read(large(chat()), lambda now, result: None) for _ in range(WAITING_MAX)]
        refused = reader.read(large(chat()), lambda now, result: None)
        cancel = taken[0]
        assert cancel is not None
        cancel()
        again = reader.read(large(chat()), lambda now, result: None)

    assert (refused, all(taken)) == (None, True)
    assert again is not None


async def test_client_with_the_most_waiting_bodies_loses_its_newest_one():
    refused: list[str] = []
    async with running() as reader:
        stop(reader)

        def send(client: str, name: str) -> bool:
            body = replace(large(chat()), client=client)
            return reader.read(body, lambda now, result: refused.append(f"{name} {code(result)}")) is not None

        taken = [send("many", f"many-{number}") for number in range(WAITING_MAX)]
        assert all(taken)
        assert [send("few", "few-1"), send("many", "late"), send("few", "few-2")] == [True, False, True]
        await until(lambda: len(refused) == 2)

    assert refused == [f"many-{WAITING_MAX - number} overloaded" for number in (1, 2)]


async def test_one_process_takes_the_shortest_body_and_one_the_oldest():
    """The second process is stopped while it has a body, so that the order does not depend on the processes' speed."""
    order: list[int] = []
    async with running(read_s=60.0) as reader:
        await asyncio.gather(*(reading(reader, chat()) for _ in range(PROCESSES)))
        os.kill(reader.pids[1], signal.SIGSTOP)
        for words in (50_000, 30_000, 10_000, 20_000, 40_000):
            reader.read(large(chat("word " * words)), lambda now, result, words=words: order.append(words))
        await until(lambda: len(order) == 4)
        os.kill(reader.pids[1], signal.SIGCONT)
        await until(lambda: len(order) == 5)

    assert order == [10_000, 20_000, 30_000, 40_000, 50_000]


async def test_long_body_is_read_while_shorter_bodies_keep_arriving():
    short, most, answered = large(chat()), 300, 0
    ahead: list[int] = []
    async with running() as reader:

        def flood(now: float, result: object) -> None:
            nonlocal answered
            answered += 1
            if not ahead and answered < most:
                reader.read(short, flood)

        await asyncio.gather(*(reading(reader, chat()) for _ in range(PROCESSES)))
        for _ in range(PROCESSES + 2):
            reader.read(short, flood)
        reader.read(large(chat("word " * 50_000)), lambda now, result: ahead.append(answered))
        await until(lambda: bool(ahead))

    assert ahead[0] < most, "the long body waits as long as shorter bodies arrive"


async def test_cancelled_reading_is_not_answered():
    answered: list[object] = []
    async with running() as reader:
        cancel = reader.read(large(chat("word " * 100_000)), lambda now, result: answered.append(result))
        assert cancel is not None
        await asyncio.sleep(0)
        cancel()
        await reading(reader, chat("word " * 200_000))
        await reading(reader, chat("word " * 200_000))

    assert answered == []


async def test_process_that_cannot_start_refuses_bodies_until_it_can(monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/nonexistent/python")
    reader = ReadingProcesses()
    task = asyncio.create_task(reader.run())
    refused = await reading(reader, chat())
    monkeypatch.undo()
    read = await reading(reader, chat())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert code(refused) == "overloaded"
    assert read == read_body(chat(), Api.CHAT)


async def test_process_ignores_the_signals_that_end_the_router():
    async with running() as reader:
        await reading(reader, chat())
        await reading(reader, chat())
        pids = reader.pids
        for pid in pids:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, number)
        for _ in range(4):
            assert await reading(reader, chat()) == read_body(chat(), Api.CHAT)
        assert reader.pids == pids


async def test_process_ends_with_the_router():
    async with running() as reader:
        pids = reader.pids
    assert not any(_runs(str(pid)) for pid in pids)


async def test_process_has_no_grpc():
    listing = "import sys, dualmap_extproc.reading.worker; print(*sorted(sys.modules))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", listing, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()

    assert not {"grpc", "asyncio", "aiohttp", "google.protobuf", "prometheus_client"} & set(output.decode().split())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_process_ends_when_its_router_is_killed():
    program = (
        "import asyncio, dualmap_extproc.reading.processes as p\n"
        "async def main():\n"
        "    reader = p.ReadingProcesses()\n"
        "    task = asyncio.create_task(reader.run())\n"
        "    while len(reader.pids) < p.PROCESSES: await asyncio.sleep(0.01)\n"
        "    print(*reader.pids, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pids = (await process.stdout.readline()).split()
    process.kill()
    await process.wait()

    await until(lambda: not any(_runs(pid.decode()) for pid in pids))


def _runs(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


async def rendered(reader: ReadingProcesses, folder: Path, body: bytes) -> Rendered | None:
    prompt = await reading(reader, body, str(folder))
    assert isinstance(prompt, Prompt)
    return prompt.rendered


async def test_process_renders_with_the_newest_chat_template(tmp_path: Path) -> None:
    folder, body = tmp_path / "tokenizer", chat("Hi", model="m")
    async with running() as reader:
        assert await rendered(reader, folder, body) is None
        write_tokenizer(folder, template="{{ messages[0].content }}!")
        assert await rendered(reader, folder, body) == Rendered("Hi!", special=False)
        write_tokenizer(folder, template="{{ messages[0].content }}, another version")
        assert await rendered(reader, folder, body) == Rendered("Hi, another version", special=False)
        assert await rendered(reader, folder, chat("Hi", model="m", echo=True)) is None


async def test_template_that_takes_too_long_leaves_the_process_alive(tmp_path: Path) -> None:
    loop = "{%- for a in range(9000) %}{%- for b in range(9000) %}{{- b }}{%- endfor %}{%- endfor %}"
    slow = "{%- if messages | length > 1 %}" + loop + "{%- endif %}{{ messages[0].content }}"
    folder = write_tokenizer(tmp_path / "tokenizer", template=slow)
    two = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}] * 2}).encode()
    async with running() as reader:
        pids = reader.pids
        assert await rendered(reader, folder, two) is None
        assert await rendered(reader, folder, chat("Hi", model="m")) == Rendered("Hi", special=False)
        assert reader.pids == pids


def test_rendered_text_above_the_limit_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_tokenizer(tmp_path / "tokenizer", template="{{ messages[0].content }}"))
    body = json.loads(chat("four", model="m"))
    render = Templates()
    monkeypatch.setattr(worker, "RENDERED_MAX_CHARACTERS", 4)
    assert render(folder, body, Api.CHAT) == Rendered("four", special=False)
    monkeypatch.setattr(worker, "RENDERED_MAX_CHARACTERS", 3)
    assert render(folder, body, Api.CHAT) is None


def test_any_failure_of_a_template_leaves_a_body_unrendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, body = str(write_tokenizer(tmp_path / "tokenizer")), json.loads(chat("Hi", model="m"))
    render = Templates()

    def fail(*_: object) -> None:
        raise KeyError("hostile")

    monkeypatch.setattr(PromptTexts, "rendered", fail)
    assert render(folder, body, Api.CHAT) is None


def test_worker_keeps_a_bounded_number_of_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_FOLDERS_MAX", 2)
    render = Templates()
    for number in range(4):
        render(str(write_tokenizer(tmp_path / str(number))), json.loads(chat(model="m")), Api.CHAT)
    assert [Path(each).name for each in render._read] == ["2", "3"]
