"""Runs in parallel processes: results in order, the garbage collector off, and no process left behind.

The workers are forked, so they share what the parent has loaded. Each is handed one item at a time through a pipe of
its own: a worker that dies is noticed, and workers whose parent dies end with the item under way. Neighbours:
``experiment`` and ``goodput`` are what runs here.
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
# Signals for which a worker has handlers of its own.
_RESET: Final = (signal.SIGINT, signal.SIGTERM)


class WorkerError(Exception):
    """A worker process raised or died; ``str()`` ends with its traceback where there is one."""


def run_parallel(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    processes: int,
    on_done: Callable[[int, Result], None] | None = None,
) -> list[Result]:
    """Apply a function to items in forked processes; return the results in the items' order.

    ``on_done`` is called here with each item's number and result as it is done. Raises WorkerError.
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
    """As ``run_parallel``, with a function that also receives a callback for its progress.

    ``on_progress`` is called in this process with the item's number and the reported value.
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
    """A process and the parent's end of its pipe; ``number`` is that of the item it works on."""

    def __init__(self, function: Callable[[Item, Report], Result], *, inherited: Sequence[Connection]) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.number = -1
        self._process = context.Process(
            target=_work, args=(function, theirs, (*inherited, self.pipe)), name="dualmap-run", daemon=True
        )
        # The parent's handlers must not run in the worker: one that raises before ``_work`` has reset them is lost in
        # the interpreter's start-up, and ``end`` would wait for ever. Until then signals stay pending.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def begin(self, number: int, item: Item) -> None:
        """Hand over the next item."""
        self.number = number
        self.pipe.send(item)

    def hear(self) -> tuple[int, Any]:
        """Return the worker's message; raises WorkerError when it has failed or died."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise WorkerError(f"a worker process ended with exit code {self._process.exitcode}") from None
        if kind == _FAILED:
            raise WorkerError(f"a run failed:\n{value}")
        return kind, value

    def end(self) -> None:
        """Stop the process at once, and wait until it has ended."""
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _silently(function: Callable[[Item], Result], item: Item, _report: Report) -> Result:
    return function(item)


def _work(function: Callable[[Item, Report], Result], pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Work off items until the parent closes its end; runs in the worker."""
    # Ctrl-C reaches every process of the terminal; the parent stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
    # A worker sees the parent's end only if no worker keeps the parent's ends of the pipes open.
    for each in inherited:
        each.close()
    # The collector finds nothing during a run, because its objects live until its end; the parent's objects stay.
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
        gc.collect()  # Between runs, reference cycles can be collected.
        pipe.send(answer)
