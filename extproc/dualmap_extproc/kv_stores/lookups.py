"""Looks prompts up in one store: answers at hand first, else one question, for which a request waits a bounded time.

A late answer is still of use for the next request with the same prefix. An old answer counts at once, and is renewed
behind the request. Requests that ask for the same chunks at the same time share one question. A store that fails or is
late several times in a row is left alone for a while (``dualmap.kv_store.availability``). Then what is known of the
last seconds counts.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dualmap.kv_store.availability import Availability
from dualmap.kv_store.view import StoreMatch, StoreView
from dualmap_edge.logs import get_logger
from dualmap_extproc.kv_stores.contract import Question, StoreClient, StoreError
from dualmap_extproc.kv_stores.metrics import KvStoreMetrics, LookupResult

QUESTION_S: Final = 1.0
"""The longest time for which the answer to a question is awaited behind the request."""
QUESTIONS_MAX: Final = 64
"""The most questions to one store at the same time. Further prompts are not looked up."""
_REASON_LONGEST: Final = 300

_log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that waits for an answer until ``timer``."""

    chunks: tuple[str, ...]
    since_s: float
    done: Callable[[StoreMatch], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Asked:
    """A question without an answer, and the requests that wait for it. It is late after ``timer``."""

    waiting: list[_Waiting] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False


class Lookups:
    """The lookups of one pool (``namespace/name``) in the store at ``endpoint``. Construct it in an event loop."""

    def __init__(
        self,
        pool: str,
        endpoint: str,
        client: StoreClient,
        metrics: KvStoreMetrics,
        *,
        chunk_tokens: int,
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._client = client
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._view = StoreView()
        self.availability = Availability()
        """Whether the store is asked."""
        # The questions without an answer, by the last chunk that they ask for: its key stands for all chunks before it.
        self._asked: dict[str, _Asked] = {}

    def match(
        self, chunks: tuple[str, ...], ids: "array[int]", salt: str, done: Callable[[StoreMatch], None]
    ) -> StoreMatch | Callable[[], None]:
        """Return what the store holds of a prompt's chunks; or a function that cancels, and call ``done`` later."""
        now = self._loop.time()
        unknown = self._view.unknown(now, chunks)
        if not unknown:
            return self._count(self._match(chunks))
        asked = self._asked.get(unknown[-1])
        if asked is None and len(self._asked) < QUESTIONS_MAX and self.availability.may_ask(now):
            asked = self._ask(Question(keys=unknown, chunks=chunks, ids=ids, salt=salt))
        if self._view.is_known(now, chunks):
            return self._count(self._match(chunks))
        if asked is None:
            self._metrics.count(self._pool, LookupResult.SKIPPED)
            return self._match(chunks)
        if asked.is_late:
            # The request would wait in vain as well.
            self._metrics.count(self._pool, LookupResult.TIMEOUT)
            return self._match(chunks)
        waiting = _Waiting(chunks, now, done)
        waiting.timer = self._loop.call_later(self._timeout_s, self._give_up, asked, waiting)
        asked.waiting.append(waiting)

        def cancel() -> None:
            if waiting in asked.waiting:
                asked.waiting.remove(waiting)
            if waiting.timer is not None:
                waiting.timer.cancel()

        return cancel

    async def close(self) -> None:
        """Stop all questions, and close the connections. Requests that wait get no answer."""
        asked, self._asked = tuple(self._asked.values()), {}
        for each in asked:
            for timer in (each.timer, *(waiting.timer for waiting in each.waiting)):
                if timer is not None:
                    timer.cancel()
            if each.task is not None:
                each.task.cancel()
        await asyncio.gather(*(each.task for each in asked if each.task is not None), return_exceptions=True)
        await self._client.close()

    def release(self) -> None:
        """Let no request wait any longer."""
        for asked in self._asked.values():
            self._answer_all(asked, None)

    def _ask(self, question: Question) -> _Asked:
        asked = self._asked[question.keys[-1]] = _Asked()
        asked.timer = self._loop.call_later(self._timeout_s, self._late, asked)
        asked.task = self._loop.create_task(self._run(question, asked))
        return asked

    async def _run(self, question: Question, asked: _Asked) -> None:
        error: str | None = None
        try:
            async with asyncio.timeout(QUESTION_S):
                found = await self._client.ask(question)
            self._view.put(self._loop.time(), question.keys, found)
        except StoreError as store_error:
            error = str(store_error)
        except TimeoutError:
            error = f"no answer within {QUESTION_S:g} s"
        except Exception as unexpected:  # noqa: BLE001  # no answer of a store may end more than its question
            error = f"{type(unexpected).__name__} while reading an answer"
        finally:
            self._asked.pop(question.keys[-1], None)
            if asked.timer is not None:
                asked.timer.cancel()
        if error is not None:
            # A late question has failed before.
            if not asked.is_late:
                self._failed(error)
        elif not asked.is_late and self.availability.answered():
            self._metrics.set_up(self._pool, is_up=True)
            _log.info("KV store works again", pool=self._pool, endpoint=self._endpoint)
        self._answer_all(asked, error)

    def _answer_all(self, asked: _Asked, error: str | None) -> None:
        waiting, asked.waiting = asked.waiting, []
        for each in waiting:
            if each.timer is not None:
                each.timer.cancel()
            match = self._match(each.chunks)
            if error is None:
                self._count(match)
            else:
                self._metrics.count(self._pool, LookupResult.ERROR)
            self._metrics.waited(self._pool, self._loop.time() - each.since_s)
            each.done(match)

    def _late(self, asked: _Asked) -> None:
        asked.is_late = True
        self._failed(f"no answer within {1000 * self._timeout_s:g} ms")

    def _give_up(self, asked: _Asked, waiting: _Waiting) -> None:
        if waiting not in asked.waiting:
            return
        asked.waiting.remove(waiting)
        self._metrics.count(self._pool, LookupResult.TIMEOUT)
        self._metrics.waited(self._pool, self._loop.time() - waiting.since_s)
        waiting.done(self._match(waiting.chunks))

    def _failed(self, reason: str) -> None:
        if self.availability.failed(self._loop.time(), reason[:_REASON_LONGEST]):
            self._metrics.set_up(self._pool, is_up=False)
            _log.warning(
                "KV store does not work, leaving it alone",
                pool=self._pool,
                endpoint=self._endpoint,
                reason=self.availability.reason,
            )

    def _match(self, chunks: Sequence[str]) -> StoreMatch:
        return self._view.match(self._loop.time(), chunks, self._chunk_tokens)

    def _count(self, match: StoreMatch) -> StoreMatch:
        self._metrics.count(self._pool, LookupResult.HIT if match.tokens else LookupResult.MISS)
        return match
