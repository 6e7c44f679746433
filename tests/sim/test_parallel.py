"""Tests of runs in parallel processes: order, progress, failure, and no remaining processes."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualmap_sim.parallel import Report, WorkerError, run_parallel, run_reporting


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("processes", [1, 2, 5, 40])
def test_parallel_results_keep_order_and_are_reported_on_completion(processes: int) -> None:
    done: dict[int, int] = {}
    assert run_parallel(square, range(20), processes=processes, on_done=done.__setitem__) == [n * n for n in range(20)]
    assert done == {n: n * n for n in range(20)}
    assert multiprocessing.active_children() == []


def test_parallel_without_items_starts_no_process() -> None:
    assert run_parallel(square, [], processes=4) == []


def test_parallel_work_runs_in_worker_processes() -> None:
    def which(_item: int) -> tuple[int, bool]:
        return os.getpid(), gc.isenabled()

    answers = run_parallel(which, range(8), processes=2)
    processes = {process for process, _ in answers}
    assert len(processes) in (1, 2)
    assert os.getpid() not in processes
    assert not any(collects for _, collects in answers)
    assert gc.isenabled()


def test_parallel_progress_contains_the_item_number() -> None:
    def count(upto: int, tell: Report) -> None:
        for number in range(upto):
            tell(number)

    told: list[tuple[int, int]] = []
    run_reporting(count, [2, 0, 3], processes=2, on_progress=lambda number, value: told.append((number, value)))
    assert sorted(told) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_parallel_failure_raises_with_worker_traceback() -> None:
    def fail(number: int) -> int:
        return 1 // (number - 3)

    with pytest.raises(WorkerError, match=r"(?s)in fail.*ZeroDivisionError"):
        run_parallel(fail, range(10), processes=2)
    assert multiprocessing.active_children() == []


def test_parallel_with_killed_worker_raises_worker_error() -> None:
    def die(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(WorkerError, match=f"exit code {-signal.SIGKILL}"):
        run_parallel(die, range(10), processes=2)
    assert multiprocessing.active_children() == []


def test_parallel_workers_stop_if_the_caller_raises() -> None:
    def wait_for_ever(number: int) -> int:
        if number:
            signal.pause()
        return number

    def stop(_number: int, _result: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parallel(wait_for_ever, [0, 1, 2], processes=3, on_done=stop)
    assert multiprocessing.active_children() == []


def test_parallel_worker_stopped_at_start_ends_with_failed_run() -> None:
    """The second worker waits between its fork and its first line until the parent has sent SIGTERM."""
    script = """
import os, signal, sys, time
from dualmap_sim import parallel
signal.signal(signal.SIGTERM, lambda *_: sys.exit("the parent's handler ran in a worker"))
forks = []
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: hold_the_second())
def hold_the_second():
    while len(forks) == 2 and signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
def fail(item):
    raise ValueError(item)
try:
    parallel.run_parallel(fail, range(2), processes=2)
except parallel.WorkerError:
    print("a run failed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("a run failed\n", "")


def test_parallel_workers_end_after_the_parent_is_killed(tmp_path: Path) -> None:
    """The workers end after their current item."""
    script = f"""
import os, signal
from dualmap_sim import parallel
def work(item):
    os.open({str(tmp_path)!r} + "/alive", os.O_WRONLY | os.O_NONBLOCK)
    return item
def killed(number, result):
    os.kill(os.getpid(), signal.SIGKILL)
parallel.run_parallel(work, range(100), processes=3, on_done=killed)
"""
    # Every worker has the pipe open for writing, so a reader reaches its end when the last worker has ended.
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with subprocess.Popen([sys.executable, "-c", script]) as parent:
            assert parent.wait() == -signal.SIGKILL
        os.set_blocking(alive, True)
        assert os.read(alive, 1) == b""
    finally:
        os.close(alive)
