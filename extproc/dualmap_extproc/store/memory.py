"""A store for several routers in one process, without a server: implements ``contract.Store``.

Tests and benchmarks of several replicas use this store, and ``peers_store`` keeps what routers publish in one.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dualmap.keys.sessions import MAX_SESSIONS
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import REMEMBERED_S, Report
from dualmap_extproc.store.contract import (
    HISTORY_ENTRIES_MAX,
    PAGE_ENTRIES,
    Answer,
    Claim,
    Entry,
    LoadEntry,
    Post,
    Question,
    ReportEntry,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredUpdate:
    number: int
    peer: str
    update: ReplicaUpdate
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredLoads:
    number: int
    loads: Mapping[str, SharedLoad]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredReport:
    number: int
    report: Report
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredBinding:
    binding: SharedBinding
    moved_at_s: float
    until_s: float

    def at(self, now: float) -> SharedBinding:
        return replace(self.binding, moved_ago_s=max(0.0, now - self.moved_at_s))


@dataclass(slots=True)
class _PoolState:
    """The state of one pool."""

    updates: deque[_StoredUpdate] = field(default_factory=lambda: deque(maxlen=HISTORY_ENTRIES_MAX))
    loads: dict[str, _StoredLoads] = field(default_factory=dict)
    reports: dict[str, _StoredReport] = field(default_factory=dict)
    # The number of the last post; posts are numbered in the order of publication.
    numbers: int = 0
    bindings: dict[int, _StoredBinding] = field(default_factory=dict)


class MemoryStore:
    """A store in memory: all replicas use the same object. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pools: dict[str, _PoolState] = {}

    async def read(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Return the answer to each question (``contract.Store``)."""
        return tuple(self._answer(peer, question) for question in questions)

    async def resolve(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the valid bindings (``contract.Store``)."""
        return tuple(tuple(self._resolve(claim, binding) for binding in claim.bindings) for claim in claims)

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Publish to the other replicas (``contract.Store``)."""
        self.put(peer, posts)

    def put(self, peer: str, posts: Sequence[Post]) -> None:
        """Keep the posts of ``peer``."""
        now = self._clock()
        for post in posts:
            state = self._pool(post.pool)
            while state.updates and state.updates[0].at_s < now - post.keep_s:
                state.updates.popleft()
            for expired in [each for each, told in state.loads.items() if now - told.at_s >= PEER_TTL_S]:
                del state.loads[expired]
            for expired in [each for each, told in state.reports.items() if now - told.at_s >= REMEMBERED_S]:
                del state.reports[expired]
            state.numbers += 1
            if post.update is not None:
                update = replace(post.update, loads=None, wanted=())
                state.updates.append(_StoredUpdate(number=state.numbers, peer=peer, update=update, at_s=now))
            if post.loads is not None:
                state.loads[peer] = _StoredLoads(number=state.numbers, loads=post.loads, at_s=now)
            if post.report is not None:
                state.reports[peer] = _StoredReport(number=state.numbers, report=post.report, at_s=now)

    async def close(self) -> None:
        """Do nothing: there are no connections (``contract.Store``)."""

    def _answer(self, peer: str, question: Question) -> Answer:
        now = self._clock()
        state = self._pool(question.pool)
        after, last_words_after = (0, 0) if question.cursor is None else map(int, question.cursor.split())
        since_s = now - question.window_s if question.cursor is None else -math.inf
        # The search starts at the newest update: a replica that reads regularly needs few of the thousands of updates.
        new = takewhile(lambda told: told.number > after and told.at_s >= since_s, reversed(state.updates))
        heard = [told for told in new if told.peer != peer][::-1]
        more, page = len(heard) > PAGE_ENTRIES, heard[:PAGE_ENTRIES]
        kept = (state.bindings.get(session) for session in question.wanted)
        return Answer(
            cursor=f"{page[-1].number if more else state.numbers} {state.numbers}",
            entries=tuple(Entry(peer=told.peer, update=told.update, age_s=now - told.at_s) for told in page),
            loads=tuple(
                LoadEntry(peer=each, loads=told.loads, age_s=now - told.at_s)
                for each, told in state.loads.items()
                if told.number > last_words_after and now - told.at_s < PEER_TTL_S and each != peer
            ),
            reports=tuple(
                ReportEntry(peer=each, report=told.report, age_s=now - told.at_s)
                for each, told in state.reports.items()
                if told.number > last_words_after and now - told.at_s < REMEMBERED_S and each != peer
            ),
            bindings=tuple(each.at(now) for each in kept if each is not None and each.until_s > now),
            more=more,
        )

    def _resolve(self, claim: Claim, binding: SharedBinding) -> SharedBinding:
        now = self._clock()
        bindings = self._pool(claim.pool).bindings
        moved_at_s = now - binding.moved_ago_s
        held = bindings.get(binding.session)
        if held is not None and held.until_s > now and held.binding.version >= binding.version:
            if (held.binding.version, held.binding.host) != (binding.version, binding.host):
                return held.at(now)
            moved_at_s = held.moved_at_s
        kept = _StoredBinding(binding=binding, moved_at_s=moved_at_s, until_s=now + claim.ttl_s)
        # The move to the end keeps the dictionary in the order of renewal.
        bindings.pop(binding.session, None)
        bindings[binding.session] = kept
        while len(bindings) > 1:
            oldest = next(iter(bindings))
            if len(bindings) <= MAX_SESSIONS and bindings[oldest].until_s > now:
                break
            del bindings[oldest]
        return kept.at(now)

    def keep_pools(self, serves: Callable[[str], bool]) -> None:
        """Forget all pools for which ``serves`` returns False."""
        for gone in [pool for pool in self._pools if not serves(pool)]:
            del self._pools[gone]

    def _pool(self, pool: str) -> _PoolState:
        return self._pools.setdefault(pool, _PoolState())
