"""Tests that the demo's child processes end with the demo. The children in these tests are small Python programs."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dualmap_cli.demo.children import Children
from dualmap_cli.demo.errors import ChildError
from gone import GONE_WITHIN_S, wait_until_gone

READY = "import os, sys, time; print('dualmap fake ready http=127.0.0.1:1 pid=%d' % os.getpid(), flush=True); "
SLEEPS = READY + "time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
HAS_A_CHILD = (
    "import subprocess, sys; own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('grandchild', own.pid, flush=True); " + SLEEPS
)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def ready_pid(children: Children, name: str, code: str) -> int:
    child = await children.start(name, python(code))
    return int((await child.ready(within_s=GONE_WITHIN_S))["pid"])


async def test_child_process_ready_line_is_read_and_output_kept(tmp_path):
    async with Children(tmp_path / "logs") as children:
        child = await children.start("fake", python(SLEEPS))

        assert (await child.ready(within_s=GONE_WITHIN_S))["http"] == "127.0.0.1:1"

    assert "dualmap fake ready" in (tmp_path / "logs" / "fake.log").read_text()


@pytest.mark.parametrize("code", [SLEEPS, DEAF], ids=["ends on SIGTERM", "deaf to SIGTERM"])
async def test_context_exit_ends_the_child_processes(tmp_path, code):
    async with Children(tmp_path, grace_s=0.5) as children:
        pids = [await ready_pid(children, f"fake-{n}", code) for n in range(2)]

    assert all(wait_until_gone(pid) for pid in pids)


async def test_grandchild_processes_end_with_their_parent(tmp_path):
    async with Children(tmp_path) as children:
        await ready_pid(children, "fake", HAS_A_CHILD)
        grandchild = int((tmp_path / "fake.log").read_text().split()[1])

    assert wait_until_gone(grandchild)


async def test_exception_in_the_context_ends_the_child_processes(tmp_path):
    with suppress(ZeroDivisionError):
        async with Children(tmp_path) as children:
            pid = await ready_pid(children, "fake", SLEEPS)
            raise ZeroDivisionError

    assert wait_until_gone(pid)


async def test_child_process_exit_before_ready_shows_its_log(tmp_path):
    async with Children(tmp_path) as children:
        child = await children.start("fake", python("print('no such thing'); raise SystemExit(3)"))
        with pytest.raises(ChildError) as failure:
            await child.ready(within_s=GONE_WITHIN_S)

    assert "fake exited with code 3" in str(failure.value)
    assert "no such thing" in str(failure.value)
    assert str(tmp_path / "fake.log") in str(failure.value)


async def test_child_process_never_ready_times_out(tmp_path):
    async with Children(tmp_path) as children:
        child = await children.start("fake", python("import time; time.sleep(600)"))
        with pytest.raises(ChildError, match=r"fake did not become ready within 0\.2 s"):
            await child.ready(within_s=0.2)

    assert wait_until_gone(child.process.pid)


async def test_child_process_crash_cancels_the_guarded_work(tmp_path):
    cancelled = asyncio.Event()

    async def work() -> None:
        os.kill(pid, signal.SIGKILL)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with Children(tmp_path) as children:
        pid = await ready_pid(children, "fake", SLEEPS)
        await ready_pid(children, "other", SLEEPS)
        with pytest.raises(ChildError, match="fake was killed by signal 9"):
            await children.guard(work())

    assert cancelled.is_set()


async def test_guard_returns_the_result_or_raises_the_error(tmp_path):
    async def fails() -> None:
        raise ZeroDivisionError

    async with Children(tmp_path) as children:
        await ready_pid(children, "fake", SLEEPS)

        assert await children.guard(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ZeroDivisionError):
            await children.guard(fails())


async def test_run_keeps_the_process_output(tmp_path):
    async with Children(tmp_path) as children:
        await children.run("fake", python("print('a: 1')"), into=tmp_path / "out", within_s=GONE_WITHIN_S)

    assert (tmp_path / "out").read_text() == "a: 1\n"


async def test_run_of_failed_process_shows_its_stderr(tmp_path):
    async with Children(tmp_path) as children:
        with pytest.raises(ChildError, match=r"exited with code 1(.|\n)*boom"):
            await children.run(
                "fake", python("raise SystemExit('boom')"), into=tmp_path / "out", within_s=GONE_WITHIN_S
            )


async def test_run_timeout_leaves_no_process(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    async with Children(tmp_path) as children:
        with pytest.raises(ChildError, match="did not end within"):
            await children.run("fake", python(code), into=tmp_path / "out", within_s=1.0)

    # The child may have ended before it printed its process ID.
    assert all(wait_until_gone(int(pid)) for pid in (tmp_path / "out").read_text().split())


PARENT = f"""
import asyncio, sys
from pathlib import Path
from dualmap_cli.demo.children import Children
from dualmap_cli.demo.command import _interruptible

async def work():
    async with Children(Path(sys.argv[1]), grace_s=0.5) as children:
        for number in range(2):
            child = await children.start(f"fake-{{number}}", (sys.executable, "-c", {DEAF!r}))
            print((await child.ready(within_s=20))["pid"], flush=True)
        await asyncio.Event().wait()

asyncio.run(_interruptible(work()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_signal_to_the_demo_ends_its_child_processes(tmp_path: Path, number: signal.Signals):
    """After SIGKILL, the demo cannot stop its children."""
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        if number is not signal.SIGKILL:
            parent.send_signal(number)  # a second signal must not interrupt the clean-up
        parent.wait(GONE_WITHIN_S)

    assert all(wait_until_gone(pid) for pid in pids)
