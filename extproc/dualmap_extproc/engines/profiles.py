"""Asks every member's engine for its profile, off the path of requests, and reports each profile.

Each member has a task. The task reads the engine's metrics page at least once a second, because it contains the load.
It requests the other pages when the member joins, when the engine's process has another start time, and every
``spec.engine.discovery.interval``. A page that is not answered keeps its last values while the engine's process is the
same. An engine that does not answer is asked less often, up to once per interval.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from dualmap.engines.profile import (
    DIALECTS,
    NO_PROFILE,
    EngineProfile,
    read_event_sources,
    read_metrics,
    read_models,
    read_server_info,
    read_version,
)
from dualmap.pools.pool import Engine, Member, Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.engines.client import AnswerError, EngineClient

LOAD_PERIOD_S: Final = (0.85, 0.95)
"""The shortest and the longest time between two requests for a load. Load of other sources needs two of them."""
_JOIN_JITTER_S: Final = 0.5
_TICK_S: Final = 0.1
_FIRST_RETRY_S: Final = 1.0

Report = Callable[[str, str, EngineProfile], None]
"""Receives a profile: the pool (``namespace/name``), the member's id, and the profile."""
Reader = Callable[[object], EngineProfile]

_log = get_logger(__name__)
# The pages that each type of engine answers in addition to its metrics, and their readers.
_PAGES: Final[dict[str, dict[str, Reader]]] = {
    "vLLM": {
        "/version": read_version,
        "/v1/models": read_models,
        "/kv_event_sources": read_event_sources,
    },
    "SGLang": {"/server_info": read_server_info, "/v1/models": read_models},
    "TensorRTLLM": {"/version": read_version, "/v1/models": read_models},
    "Generic": {"/v1/models": read_models},
}
# vLLM answers this page from 0.31 on, and only if it publishes events.
_OPTIONAL: Final = frozenset({"/kv_event_sources"})


class _Asked(NamedTuple):
    """A member that is asked. Another address, process or setting makes it another one."""

    pool: str
    id: str
    endpoint: str
    incarnation: str
    type: str
    interval_s: float


class EngineProfiles:
    """Asks the engines of all pools with discovery; construct it in an event loop.

    ``report`` receives the profile of a member at least once per interval, and once a second while the engine answers.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._client = EngineClient()
        self._tasks: dict[_Asked, asyncio.Task[None]] = {}

    def set_pools(self, pools: Sequence[Pool]) -> None:
        """Ask the members of these pools from now on, and no others."""
        wanted = {
            _asked(pool, member): (pool, member)
            for pool in pools
            if pool.engine.discovery.enabled
            for member in pool.members
        }
        for gone in self._tasks.keys() - wanted.keys():
            self._tasks.pop(gone).cancel()
        for asked, (pool, member) in wanted.items():
            if asked not in self._tasks:
                engine = _AskedEngine(self._client, member, pool.engine)
                task = asyncio.create_task(engine.follow(partial(self._report, pool.id, member.id)))
                task.add_done_callback(partial(self._ended, asked))
                self._tasks[asked] = task

    async def close(self) -> None:
        """Stop asking, and close open connections."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _ended(self, asked: _Asked, task: "asyncio.Task[None]") -> None:
        """Report a task that ended with an unexpected error. Routing goes on without the member's profile."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("Engine discovery failed", pool=asked.pool, member=asked.id, error=repr(error))
            self._report(asked.pool, asked.id, EngineProfile(reason=f"discovery failed: {type(error).__name__}"))


class _AskedEngine:
    """One member's engine, and what it answered last."""

    def __init__(self, client: EngineClient, member: Member, engine: Engine) -> None:
        self._client = client
        self._member = member
        self._type = engine.type
        self._interval_s = engine.discovery.interval_s
        self._dialect = DIALECTS.get(engine.type)
        self._clock = asyncio.get_running_loop().time
        self._load = NO_PROFILE
        self._pages: dict[str, EngineProfile] = {}
        # The facts of all pages together.
        self._facts = EngineProfile(engine=engine.type)
        self._pages_due_s = 0.0
        self._silent = self._dialect is not None

    async def follow(self, report: Callable[[EngineProfile], None]) -> None:
        """Ask the engine until cancelled; report each profile."""
        await asyncio.sleep(random.uniform(0.0, _JOIN_JITTER_S))
        retry_s = _FIRST_RETRY_S
        while True:
            load_known = await self._ask_load()
            if not self._silent and self._clock() >= self._pages_due_s:
                # The jitter keeps routers that started together from asking together.
                self._pages_due_s = self._clock() + self._interval_s * random.uniform(0.9, 1.0)
                await self._ask_pages()
            report(self._facts.also(self._load))
            if self._dialect is None:
                await asyncio.sleep(max(0.0, self._pages_due_s - self._clock()))
            elif load_known:
                retry_s = _FIRST_RETRY_S
                await asyncio.sleep(self._until_tick_s(random.uniform(*LOAD_PERIOD_S)))
            else:
                await asyncio.sleep(retry_s * random.uniform(0.9, 1.0))
                retry_s = min(2 * retry_s, self._interval_s)

    def _until_tick_s(self, seconds: float) -> float:
        """Return about so many seconds, so that several members' requests fall into one wake-up of the process."""
        now = self._clock()
        return (now + seconds) // _TICK_S * _TICK_S - now

    async def _ask_load(self) -> bool:
        """Read the metrics page; return whether it contains the load, or the type of engine has none."""
        if self._dialect is None:
            return True
        try:
            page = await self._client.page(self._member, self._dialect.path, silent=self._silent)
        except AnswerError as error:
            self._silent = error.silent
            self._load = self._load.failed(str(error))
            return False
        self._silent = False
        load = read_metrics(self._type, page)
        if load.running is None:
            self._load = self._load.failed(load.reason)
            return False
        if load.started_s != self._load.started_s:
            self._pages.clear()
            self._pages_due_s = 0.0
        self._load = load
        return True

    async def _ask_pages(self) -> None:
        for path, read in _PAGES[self._type].items():
            try:
                page = read(await self._client.document(self._member, path))
            except AnswerError as error:
                if path in _OPTIONAL:
                    continue
                page = self._pages.get(path, NO_PROFILE).failed(str(error))
            self._pages[path] = page
        self._facts = EngineProfile(engine=self._type)
        for page in self._pages.values():
            self._facts = self._facts.also(page)


def _asked(pool: Pool, member: Member) -> _Asked:
    return _Asked(
        pool=pool.id,
        id=member.id,
        endpoint=member.endpoint,
        incarnation=member.incarnation,
        type=pool.engine.type,
        interval_s=pool.engine.discovery.interval_s,
    )
