"""Runs items in parallel processes. Results are in order, garbage collection is off, and no process is left behind.

The workers are forked, so they share the data that the parent has loaded. Each worker receives one item at a time
through its own pipe. The parent therefore detects a worker that dies. If the parent dies, each worker ends after its
current item. The items are runs of ``experiment`` or searches of ``goodput``.
"""

import gc
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Report = Callable[[object], None]

_PROGRESS, _DONE, _FAILED = range(3)
# Signals that a worker handles itself.
_RESET: Final = (signal.SIGINT, signal.SIGTERM)


class WorkerError(Exception):
    """A worker process raised an exception or died. The message ends with the worker's traceback, if there is one."""


def run_parallel(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    processes: int,
    on_done: Callable[[int, Result], None] | None = None,
) -> list[Result]:
    """Apply a function to items in forked processes; return the results in the items' order.

    This process calls ``on_done`` with the number and result of each finished item. Raises WorkerError.
    """
    return run_reporting(partial(_silently, function), items, processes=processes, on_done=on_done)


def run_reporting(
    function: Callable[[Item, Report], Result],
    items: Sequence[Item],
    *,
    processes: int,
    on_done: Callable[[int, Result], None] | None = None,
    on_progress: Callable[[int, Any], None] | None = None,
) -> list[Result]:
    """Apply a function like ``run_parallel``, and report its progress. The function also receives a progress callback.

    This process calls ``on_progress`` with the item's number and the value of each report.
    """
    workers: list[_Worker[Item, Result]] = []
    results: dict[int, Result] = {}
    numbers = iter(range(len(items)))
    try:
        for number in range(min(processes, len(items))):
            workers.append(_Worker(function, inherited=[worker.pipe for worker in workers]))
            workers[-1].begin(next(numbers), items[number])
        by_pipe = {worker.pipe: worker for worker in workers}
        while len(results) < len(items):
            for pipe in wait(list(by_pipe)):
                assert isinstance(pipe, Connection)
                worker = by_pipe[pipe]
                kind, value = worker.hear()
                if kind == _PROGRESS:
                    if on_progress is not None:
                        on_progress(worker.number, value)
                    continue
                results[worker.number] = value
                if on_done is not None:
                    on_done(worker.number, value)
                following = next(numbers, None)
                if following is not None:
                    worker.begin(following, items[following])
    finally:
        for worker in workers:
            worker.end()
    return [results[number] for number in range(len(items))]


class _Worker(Generic[Item, Result]):
    """A process and the parent's end of its pipe; ``number`` is the number of the current item."""

    def __init__(self, function: Callable[[Item, Report], Result], *, inherited: Sequence[Connection]) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.number = -1
        self._process = context.Process(
            target=_work, args=(function, theirs, (*inherited, self.pipe)), name="dualmap-run", daemon=True
        )
        # The parent's signal handlers must not run in the worker. An exception from a handler before ``_work`` resets
        # the handlers is lost in the interpreter's start-up. ``end`` would then never return. So signals stay pending
        # until ``_work`` runs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def begin(self, number: int, item: Item) -> None:
        """Send the next item to the worker."""
        self.number = number
        self.pipe.send(item)

    def hear(self) -> tuple[int, Any]:
        """Return the worker's message; raises WorkerError if the worker failed or died."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise WorkerError(f"a worker process ended with exit code {self._process.exitcode}") from None
        if kind == _FAILED:
            raise WorkerError(f"a run failed:\n{value}")
        return kind, value

    def end(self) -> None:
        """Stop the process at once, and wait for its end."""
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _silently(function: Callable[[Item], Result], item: Item, _report: Report) -> Result:
    return function(item)


def _work(function: Callable[[Item, Report], Result], pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Process items until the parent closes its end of the pipe; runs in the worker."""
    # Ctrl-C reaches every process of the terminal; the parent stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    # A worker detects the parent's end only if no worker keeps the parent's ends of the pipes open.
    for each in inherited:
        each.close()
    # During a run all new objects stay in use, so a collection finds no garbage. `freeze` excludes the parent's
    # objects.
    gc.disable()
    gc.freeze()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[int, object] = (_DONE, function(item, lambda progress: pipe.send((_PROGRESS, progress))))
        except Exception:  # noqa: BLE001 - The parent raises WorkerError for any of them.
            answer = (_FAILED, traceback.format_exc())
        gc.collect()  # Between two runs, a collection frees the reference cycles.
        pipe.send(answer)
