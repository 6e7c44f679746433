"""Asks every member's engine for its profile, off the path of requests, and reports each profile.

Each member has two tasks. One reads the engine's metrics page at least once a second, because it contains the load, and
reports the load at once. The other requests the other pages when the member joins, when the engine's process has
another start time, and every ``spec.engine.discovery.interval``. A page that is not answered keeps its last values
while the engine's process is the same. An engine that does not answer is asked every two seconds. A profile also says
whether the engine lists the names of its pool's model, and a log line when that changes.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from dualmap.pools.pool import Member, Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.engines.client import EngineClient, EngineConnection, Kind
from dualmap_extproc.engines.http_answer import AnswerError

LOAD_PERIOD_S: Final = (0.85, 0.95)
"""The shortest and the longest time between two requests for a load. Load of other sources needs two of them."""
ASLEEP_KEPT_S: Final = 60.0
"""How long a member stays asleep after its engine's last valid metrics page."""
_JOIN_JITTER_S: Final = 0.5
_TICK_S: Final = 0.1
_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 2.0
"""The longest pause before the next request to a silent engine: a restarted engine must soon show its start time."""

Report = Callable[[str, str, EngineProfile], None]
"""Receives a profile: the pool (``namespace/name``), the member's id, and the profile."""
Reader = Callable[[object], EngineProfile]

_log = get_logger(__name__)
_MODELS: Final = "/v1/models"
# The pages that each type of engine answers in addition to its metrics, and their readers.
_PAGES: Final[dict[str, dict[str, Reader]]] = {
    "vLLM": {
        "/version": read_version,
        _MODELS: read_models,
        "/kv_event_sources": read_event_sources,
    },
    "SGLang": {"/server_info": read_server_info, _MODELS: read_models},
    "TensorRTLLM": {"/version": read_version, _MODELS: read_models},
    "Generic": {_MODELS: read_models},
}
# vLLM answers this page from 0.31 on, and only if it publishes events.
_OPTIONAL: Final = frozenset({"/kv_event_sources"})


class _Asked(NamedTuple):
    """A member whose engine the router asks.

    A change of its address, process, model name or settings makes it another value, so the router asks it again.
    """

    pool: str
    id: str
    endpoint: str
    incarnation: str
    type: str
    interval_s: float
    names: tuple[str, ...]


class EngineProfiles:
    """Asks the engines of all pools with discovery; construct it in an event loop.

    ``report`` receives the profile of a member at least once per interval, and once a second while the engine answers.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._client = EngineClient()
        self._tasks: dict[_Asked, asyncio.Task[None]] = {}
        # The last logged mismatch by pool and member's id. A restarted engine is asked by another task.
        self._mismatches: dict[tuple[str, str], str] = {}

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
        for left in self._mismatches.keys() - {(asked.pool, asked.id) for asked in wanted}:
            del self._mismatches[left]
        for asked, (pool, member) in wanted.items():
            if asked not in self._tasks:
                engine = _AskedEngine(self._client, member, pool, self._report, self._mismatches)
                self._tasks[asked] = asyncio.create_task(engine.follow())

    async def close(self) -> None:
        """Stop asking, and close open connections."""
        tasks = tuple(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _AskedEngine:
    """One member's engine, and what it answered last."""

    def __init__(
        self,
        client: EngineClient,
        member: Member,
        pool: Pool,
        report: Report,
        mismatches: dict[tuple[str, str], str],
    ) -> None:
        self._client = client
        self._mismatches = mismatches
        self._member = member
        self._pool = pool.id
        self._report = report
        self._type = pool.engine.type
        self._names = (pool.model.name, *pool.model.aliases)
        self._interval_s = pool.engine.discovery.interval_s
        self._dialect = DIALECTS.get(self._type)
        self._clock = asyncio.get_running_loop().time
        self._load = EngineProfile(engine=self._type)
        self._load_s = 0.0
        # The answers of the engine's process by path, and their facts together.
        self._pages: dict[str, EngineProfile] = {}
        self._facts = NO_PROFILE
        self._pages_due_s = 0.0
        self._pages_wanted = asyncio.Event()
        self._silent = self._dialect is not None
        # The pages that the last requests found unknown.
        self._unknown: set[str] = set()
        self._served_instead = ""
        self._logged = ""

    async def follow(self) -> None:
        """Ask the engine until cancelled; report each profile."""
        await asyncio.sleep(random.uniform(0.0, _JOIN_JITTER_S))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_load())
            tasks.create_task(self._follow_pages())

    async def _follow_load(self) -> None:
        connection, retry_s, is_first = self._client.connect(self._member), _FIRST_RETRY_S, True
        try:
            while True:
                known = await self._ask_load(connection)
                if not self._silent and self._clock() >= self._pages_due_s:
                    # The jitter keeps routers that started together from asking together.
                    self._pages_due_s = self._clock() + self._interval_s * random.uniform(0.9, 1.0)
                    self._pages_wanted.set()
                # The first profile of an engine that answers usually contains its pages, which name event sources.
                if self._dialect is not None and (self._silent or not is_first):
                    self._tell()
                is_first = False
                if self._dialect is None:
                    await asyncio.sleep(max(0.0, self._pages_due_s - self._clock()))
                elif known:
                    retry_s = _FIRST_RETRY_S
                    await asyncio.sleep(self._until_tick_s(random.uniform(*LOAD_PERIOD_S)))
                else:
                    await asyncio.sleep(retry_s * random.uniform(0.9, 1.0))
                    retry_s = min(2 * retry_s, _LAST_RETRY_S)
        finally:
            connection.close()

    async def _follow_pages(self) -> None:
        while True:
            await self._pages_wanted.wait()
            self._pages_wanted.clear()
            before, connection = self._facts, self._client.connect(self._member)
            try:
                await self._ask_pages(connection)
            finally:
                connection.close()
            if self._facts != before or self._dialect is None:
                self._tell()

    def _until_tick_s(self, seconds: float) -> float:
        """Return about so many seconds, so that several members' requests fall into one wake-up of the process."""
        now = self._clock()
        return (now + seconds) // _TICK_S * _TICK_S - now

    def _tell(self) -> None:
        """Report the engine's profile. The pages have precedence, because they contain the engine's settings."""
        profile, mismatch = self._load.also(self._facts), self._served_instead
        if self._dialect is not None and self._unknown >= {self._dialect.path, _MODELS}:
            mismatch = f"no {self._type} engine answers: {self._dialect.path} and {_MODELS} are not there"
            # The former engine's list says nothing about this program.
            profile = replace(profile, models=(), adapters=())
        self._log_mismatch(mismatch, known=bool(profile.models))
        try:
            self._report(self._pool, self._member.id, replace(profile, mismatch=mismatch))
        except Exception as error:  # noqa: BLE001  # One profile's fault must not stop further profiles.
            self._log(error)

    def _log_mismatch(self, mismatch: str, *, known: bool) -> None:
        """Log a mismatch that has changed. Until its models are ``known``, an engine may still have the last one."""
        key = self._pool, self._member.id
        before = self._mismatches.get(key, "")
        if mismatch and mismatch != before:
            self._mismatches[key] = mismatch
            _log.warning("Engine does not fit its pool", pool=self._pool, member=self._member.id, reason=mismatch)
        elif before and not mismatch and known:
            del self._mismatches[key]
            _log.info("Engine fits its pool again", pool=self._pool, member=self._member.id)

    async def _ask_load(self, connection: EngineConnection) -> bool:
        """Read the metrics page; return whether it contains the load, or the type of engine has none."""
        if self._dialect is None:
            return True
        try:
            page = await connection.page(self._dialect.path, Kind.SILENT if self._silent else Kind.LOAD)
            load = read_metrics(self._type, page, at_s=self._clock())
        except AnswerError as error:
            self._silent = error.silent
            self._note(self._dialect.path, unknown=error.unknown)
            load = EngineProfile(reason=str(error))
        except Exception as error:  # noqa: BLE001  # A fault in a reader must not end the task.
            load = self._log(error)
        else:
            self._silent = False
            self._note(self._dialect.path, unknown=False)
        if load.running is None:
            self._load = self._load.failed(load.reason)
            if self._clock() >= self._load_s + ASLEEP_KEPT_S:
                self._load = replace(self._load, asleep=None)
            return False
        if load.started_s != self._load.started_s:
            # A new object, because the answers to present requests belong to the former process.
            self._pages = {}
            self._pages_due_s = 0.0
        self._load, self._load_s = load, self._clock()
        return True

    async def _ask_pages(self, connection: EngineConnection) -> None:
        pages = self._pages
        for path, read in _PAGES[self._type].items():
            try:
                page = read(await connection.document(path))
                self._note(path, unknown=False)
            except AnswerError as error:
                self._note(path, unknown=error.unknown)
                if path in _OPTIONAL:
                    continue
                page = pages.get(path, NO_PROFILE).failed(str(error))
            except Exception as error:  # noqa: BLE001  # A fault in a reader must not end the task.
                page = pages.get(path, NO_PROFILE).failed(self._log(error).reason)
            pages[path] = page
        facts = NO_PROFILE
        for page in pages.values():
            facts = facts.also(page)
        self._facts = facts
        self._served_instead = facts.served_instead(self._names)

    def _note(self, path: str, *, unknown: bool) -> None:
        """Note whether the server knows a page."""
        if unknown:
            self._unknown.add(path)
        else:
            self._unknown.discard(path)

    def _log(self, error: Exception) -> EngineProfile:
        """Log an unexpected error once; return the profile that names the error."""
        if repr(error) != self._logged:
            self._logged = repr(error)
            _log.error("Engine discovery failed", pool=self._pool, member=self._member.id, error=self._logged)
        return EngineProfile(reason=f"discovery failed: {type(error).__name__}")


def _asked(pool: Pool, member: Member) -> _Asked:
    return _Asked(
        pool=pool.id,
        id=member.id,
        endpoint=member.endpoint,
        incarnation=member.incarnation,
        type=pool.engine.type,
        interval_s=pool.engine.discovery.interval_s,
        names=(pool.model.name, *pool.model.aliases),
    )
