"""The sources of token ids of all pools: their tokenizers' files, or their renderers.

Short prompts are tokenized at once. Longer ones are tokenized in threads, where the tokenizer releases the
interpreter's lock. A request whose ids are not there within TOKENIZE_MS is routed by its bytes, as in a pool without a
source. The reading processes render the bodies that they parse, so that only the tokenizer remains for a thread.

A thread cannot be stopped, and random letters take more than a second for each MiB. The longest texts therefore have
a thread of their own. Its work is of use also after the deadline: the tokenizer's cache then has the text with which
the conversation's next request begins.

The files of a tokenizer may change. A version that cannot be read is logged once, and the last valid one stays in use.
A file system that does not answer delays neither the tokenizers of other folders nor the router's exit.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from threading import Thread
from typing import Any, Final, TypeAlias, TypeVar

import orjson

from dualmap.pools.pool import Pool, Tokenizer, TokenSource
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt
from dualmap_edge.logs import get_logger
from dualmap_extproc.request.observations import Report, Tokenized
from dualmap_extproc.request.tokens import Pending, Tokens, TokensDone
from dualmap_extproc.tokens.faults import RenderedRequests, RendererFaults
from dualmap_extproc.tokens.files import VOCABULARY, FilesTokenizer
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.renderer import Renderer, RendererFault
from dualmap_extproc.tokens.rendering import CONFIG, TEMPLATE, TokenizerError, Version, version_of

TOKENIZE_MS: Final = 200
"""The longest time in milliseconds that a request waits for its token ids."""
INLINE_BYTES: Final = 8 * 1024
"""The largest body that is tokenized at once. This takes less than a millisecond, or ten for hundreds of messages."""
INLINE_RENDER_S: Final = 0.01
"""The most CPU time of a chat template that is rendered at once."""
LONG_TEXT: Final = 256 * 1024
"""The most bytes of a body, or characters of a rendered one, that do not wait for the thread of long texts."""
PENDING_MAX: Final = 64
"""The most requests that wait for one tokenizer or renderer; further ones are routed by bytes."""
RENDERED_MAX_BYTES: Final = 4 * 1024 * 1024
"""The largest body that is sent to a renderer."""
NAMES: Final = (VOCABULARY, CONFIG, TEMPLATE)
"""The files of a tokenizer."""
READ_S: Final = 30.0
"""The longest time to read a tokenizer; measured ones take less than a second."""
_THREADS: Final = 2
_POLL_S: Final = 5.0
Compute: TypeAlias = Callable[[], Coroutine[Any, Any, "array[int]"]]

_Result = TypeVar("_Result")

_log = get_logger(__name__)


class PoolTokenizers:
    """The sources of all pools. It implements ``request.tokens.TokenSources``. Construct it in an event loop."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._wanted: dict[str, Tokenizer] = {}
        # The last valid tokenizer of each pool, with the folder that it was read from.
        self._files: dict[str, _Folder] = {}
        # What is wrong with the newest version of each pool's folder.
        self._problems: dict[str, tuple[Version | None, str]] = {}
        # What is logged about each pool's chat template.
        self._logged_templates: dict[str, str] = {}
        # The number of each pool's source, with another one for each version of its files.
        self._numbers: dict[str, int] = {}
        self._next_number = count(1).__next__
        # The reading of each folder that has not ended.
        self._reading: dict[str, Future[Any]] = {}
        self._renderer = Renderer()
        self._faults = RendererFaults()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._pending: dict[asyncio.Task[None], Tokenizer] = {}
        # The kinds of failures that were logged, with their pools.
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._changed = asyncio.Event()

    def start(self, pools: Sequence[Pool]) -> None:
        """Read the tokenizers of these pools now. Raises TokenizerError for the first one that cannot be read."""
        for pool in pools:
            if pool.engine.tokenizer.source is TokenSource.FILES:
                path = pool.engine.tokenizer.path
                others = (each for each in self._files.values() if each.path == path)
                try:
                    self._files[pool.id] = next(others, None) or _Folder(path)
                except TokenizerError as error:
                    raise TokenizerError(f"{pool.id}: spec.engine.tokenizer.path: {error}") from error

    def set_pools(self, pools: Sequence[Pool]) -> None:
        """Use the sources of these pools from now on. ``run`` reads new tokenizers."""
        before, self._wanted = self._wanted, {pool.id: pool.engine.tokenizer for pool in pools}
        for pool_id in before.keys() | self._wanted.keys():
            if self._wanted.get(pool_id) != before.get(pool_id):
                self._faults.forget(pool_id)
                self._problems.pop(pool_id, None)
                self._numbers[pool_id] = self._next_number()
        for pool_id in self._numbers.keys() - self._wanted.keys():
            del self._numbers[pool_id]
        known: tuple[dict[str, Any], ...] = (self._files, self._problems, self._logged_templates)
        for each in known:
            for pool_id in each.keys() - self._paths().keys():
                del each[pool_id]
        self._logged = {each for each in self._logged if each[0] in self._wanted}
        self._changed.set()

    async def run(self) -> None:
        """Read new and changed tokenizers until cancelled."""
        while True:
            for pool, path in self._paths().items():
                await self._refresh(pool, path)
                self._log_template(pool)
            self._changed.clear()
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def status(self, pool: str, distrusted: Sequence[TokenClass]) -> dict[str, object]:
        """Return the state of a pool's source as JSON values, with the classes whose ids are not used.

        Classes of an earlier source, or of an earlier version of its files, are left out.
        """
        wanted = self._wanted.get(pool, Tokenizer())
        problem = self._problems[pool][1] if pool in self._problems else self._template_problem(pool)
        reason = problem or self._faults.reason(pool)
        return {
            "source": wanted.source.value,
            "ready": pool in self._files or (wanted.source is TokenSource.RENDERER and not reason),
            "reason": reason,
            "distrusted": [
                {"model": each.model, "api": each.api.name.lower(), "tools": each.has_tools}
                for each in distrusted
                if each.source == self._numbers.get(pool)
            ],
        }

    def tokens(
        self, pool: str, prompt: Prompt, chunks: Sequence[bytes], api: Api, *, small: bool, done: TokensDone
    ) -> Tokens | Pending | None:
        """Return the tokens of a body, or None, or call ``done`` later (``request.tokens``)."""
        wanted = self._wanted.get(pool)
        if wanted is None or wanted.source is TokenSource.ESTIMATE:
            return None
        if sum(each == wanted for each in self._pending.values()) >= PENDING_MAX:
            return None
        requests = TokenClass(prompt.model, api, prompt.has_tools, source=self._numbers[pool])
        size_bytes = sum(map(len, chunks))
        if wanted.source is TokenSource.RENDERER:
            if size_bytes > RENDERED_MAX_BYTES:
                return None
            return self._rendered(RenderedRequests(pool, prompt.model, api), wanted, chunks, requests, done)
        folder = self._files.get(pool)
        if folder is None:
            return None
        if not small:
            if prompt.rendered is None:
                return None
            length, encode = len(prompt.rendered.text), partial(folder.tokenizer.encoded, prompt.rendered)
            return self._later(pool, wanted, requests, partial(self._in_thread, length, encode), done)
        if size_bytes > INLINE_BYTES:
            encode = partial(_ids_of, folder, chunks, api, TOKENIZE_MS / 1000)
            return self._later(pool, wanted, requests, partial(self._in_thread, size_bytes, encode), done)
        began_s = time.perf_counter()
        ids = None
        try:
            ids = _ids_of(folder, chunks, api, INLINE_RENDER_S)
        except Exception as error:  # noqa: BLE001  # the request is routed, whatever is wrong with it or the tokenizer
            self._log_failure(pool, error)
        self._report(Tokenized(now=self._clock(), pool=pool, seconds=time.perf_counter() - began_s))
        return None if ids is None else Tokens(ids, requests)

    async def close(self) -> None:
        """Stop all work."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        for threads in (self._threads, self._long_texts):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._renderer.close()

    def _rendered(
        self,
        requests: RenderedRequests,
        wanted: Tokenizer,
        chunks: Sequence[bytes],
        tokens: TokenClass,
        done: TokensDone,
    ) -> Pending | None:
        """Ask a renderer, unless its last answers were faults."""
        if not self._faults.usable(self._clock(), requests):
            return None

        async def compute() -> "array[int]":
            try:
                ids = await self._renderer.ids(wanted.url, chunks, requests.api)
            except RendererFault as fault:
                self._failed(requests, str(fault))
                raise
            except UnsupportedRequest:
                self._answered(requests)
                raise
            self._answered(requests)
            return ids

        late = partial(self._failed, requests, f"{wanted.url} did not answer within {TOKENIZE_MS} ms")
        return self._later(requests.pool, wanted, tokens, compute, done, late)

    def _failed(self, requests: RenderedRequests, reason: str) -> None:
        if self._faults.failed(self._clock(), requests, reason):
            _log.warning(
                "Renderer does not work, routing by bytes",
                pool=requests.pool,
                model=requests.model,
                api=requests.api.name.lower(),
                reason=reason,
            )

    def _answered(self, requests: RenderedRequests) -> None:
        if self._faults.answered(requests):
            _log.info("Renderer works again", pool=requests.pool, model=requests.model, api=requests.api.name.lower())

    def _paths(self) -> dict[str, str]:
        return {pool: each.path for pool, each in self._wanted.items() if each.source is TokenSource.FILES}

    async def _refresh(self, pool: str, path: str) -> None:
        """Read a pool's tokenizer if it is new or changed; keep the last valid one if it cannot be read."""
        folder = self._files.get(pool)
        try:
            version = await self._read(path, partial(version_of, path, *NAMES))
        except TokenizerError as error:
            self._reject(pool, None, error)
            return
        if folder is not None and folder.path == path and folder.version == version:
            self._problems.pop(pool, None)
            return
        if pool in self._problems and self._problems[pool][0] == version:
            return
        same = [each for each in self._files.values() if each.path == path and each.version == version]
        try:
            read = same[0] if same else await self._read(path, partial(_Folder, path))
        except Exception as error:  # noqa: BLE001  # no content of a file may end the router
            self._reject(pool, version, error)
            return
        if self._paths().get(pool) == path:
            self._files[pool] = read
            self._numbers[pool] = self._next_number()
            self._problems.pop(pool, None)
            _log.info("Read tokenizer", pool=pool, path=path, cached=read.tokenizer.cached)

    def _reject(self, pool: str, version: Version | None, error: Exception) -> None:
        """Keep what is wrong with a version, None if it is not known; log it once."""
        before = self._problems.get(pool)
        self._problems[pool] = (version, str(error))
        if before != self._problems[pool]:
            kept = "keeping the last valid version" if pool in self._files else "routing by bytes"
            _log.error("Rejected tokenizer", pool=pool, reason=str(error), instead=kept)

    async def _read(self, path: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of reading a folder. Raises TokenizerError if that takes too long."""
        before = self._reading.get(path)
        if before is None or before.done():
            self._reading[path] = result = _in_daemon_thread(work)
            try:
                async with asyncio.timeout(READ_S):
                    found = await asyncio.wrap_future(result)
                del self._reading[path]
                return found
            except TimeoutError:
                pass
        raise TokenizerError(f"{path} cannot be read within {READ_S:g} s")

    def _template_problem(self, pool: str) -> str:
        folder = self._files.get(pool)
        return "" if folder is None else folder.tokenizer.problem

    def _log_template(self, pool: str) -> None:
        """Log what is wrong with a pool's chat template, and when it works again, once each."""
        problem = self._template_problem(pool)
        if problem == self._logged_templates.get(pool, ""):
            return
        self._logged_templates[pool] = problem
        if problem:
            _log.warning("Chat completions have no token ids, routing them by bytes", pool=pool, reason=problem)
        else:
            _log.info("Chat completions have token ids again", pool=pool)

    def _later(
        self,
        pool: str,
        wanted: Tokenizer,
        requests: TokenClass,
        compute: Compute,
        done: TokensDone,
        late: Callable[[], None] = lambda: None,
    ) -> Pending:
        """Call ``done`` with the ids that are computed. After the deadline, call ``late``, and ``done`` without ids."""
        task = asyncio.create_task(self._wait(pool, requests, compute, done, late))
        self._pending[task] = wanted
        task.add_done_callback(self._pending.pop)

        def cancel() -> None:
            task.cancel()

        return Pending(cancel)

    async def _wait(
        self, pool: str, requests: TokenClass, compute: Compute, done: TokensDone, late: Callable[[], None]
    ) -> None:
        began_s = self._clock()
        ids: array[int] | None = None
        try:
            async with asyncio.timeout(TOKENIZE_MS / 1000):
                ids = await compute()
        except TimeoutError:
            late()
            _log.debug("Routing by bytes", pool=pool, reason="the deadline has passed")
        except Exception as error:  # noqa: BLE001  # the request is routed, whatever is wrong with it or the tokenizer
            self._log_failure(pool, error)
        now = self._clock()
        self._report(Tokenized(now=now, pool=pool, seconds=now - began_s))
        done(now, None if ids is None else Tokens(ids, requests))

    def _log_failure(self, pool: str, error: Exception) -> None:
        """Log why a request has no ids: each kind of unexpected failure once, because clients may repeat it."""
        if isinstance(error, UnsupportedRequest):
            if _log.debugging:
                _log.debug("Routing by bytes", pool=pool, reason=str(error))
        elif (pool, type(error)) not in self._logged:
            self._logged.add((pool, type(error)))
            _log.error("Tokenizing failed, routing by bytes", pool=pool, error=repr(error)[:200])

    async def _in_thread(self, length: int, compute: Callable[[], "array[int]"]) -> "array[int]":
        """Compute the ids of a text of about ``length`` characters."""
        threads = self._threads if length <= LONG_TEXT else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(threads, compute)


class _Folder:
    """A tokenizer that was read from a folder. Raises TokenizerError if it cannot be read."""

    def __init__(self, path: str) -> None:
        self.path = path
        # First, so that a change during the reading is seen later.
        self.version = version_of(path, *NAMES)
        self.tokenizer = FilesTokenizer(path)


def _in_daemon_thread(work: Callable[[], _Result]) -> Future[_Result]:
    """Return the later result of a thread for which the interpreter does not wait at its end."""
    result: Future[_Result] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001  # the caller gets every error
            result.set_exception(error)
        except BaseException as error:  # noqa: BLE001  # a panic of the tokenizer's library
            result.set_exception(TokenizerError(repr(error)))

    Thread(target=run, name="read-tokenizer", daemon=True).start()
    return result


def _ids_of(folder: _Folder, chunks: Sequence[bytes], api: Api, within_s: float) -> "array[int]":
    """Return the ids of a body. Raises UnsupportedRequest if the tokenizer's files do not tell them."""
    return folder.tokenizer.ids(orjson.loads(b"".join(chunks)), api, within_s)
