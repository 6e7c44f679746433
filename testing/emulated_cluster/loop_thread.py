"""Runs servers in an event loop of their own thread, so a test that blocks its own loop does not stop them."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, TypeVar

_START_TIMEOUT_S: Final = 60.0
_CALL_TIMEOUT_S: Final = 30.0

Served = TypeVar("Served")
Result = TypeVar("Result")


class LoopThread(Generic[Served]):
    """A thread that enters an asynchronous context at ``start`` and leaves it at ``stop``. It starts only once."""

    def __init__(self, serve: Callable[[], AbstractAsyncContextManager[Served]], *, name: str) -> None:
        self._serve = serve
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Served]] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Return when the context is entered; raise its error if it cannot be."""
        self._thread.start()
        try:
            self._running.result(timeout=_START_TIMEOUT_S)
        except BaseException:
            self._thread.join()
            raise

    @property
    def served(self) -> Served:
        """The value of the context. The thread must have started."""
        return self._running.result(timeout=0)[2]

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the thread's loop and return its result."""
        loop, _, _ = self._running.result(timeout=0)
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=_CALL_TIMEOUT_S)

    def stop(self) -> BaseException | None:
        """Leave the context and return the error that ended it, if any."""
        loop, stopped, _ = self._running.result(timeout=0)
        if self._thread.is_alive():
            loop.call_soon_threadsafe(stopped.set)
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._enter())
        except BaseException as error:  # noqa: BLE001  # it belongs to the thread that waits for the start or the end
            if self._running.done():
                self._failure = error
            else:
                self._running.set_exception(error)

    async def _enter(self) -> None:
        stopped = asyncio.Event()
        async with self._serve() as served:
            self._running.set_result((asyncio.get_running_loop(), stopped, served))
            await stopped.wait()
