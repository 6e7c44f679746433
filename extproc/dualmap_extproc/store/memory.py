"""A store for several routers in one process, without a server: implements ``contract.Store``.

Tests and benchmarks of several replicas use it. A router without ``--redis`` is a single one and has no store.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.shares import REMEMBERED_S, Report
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
class _Told:
    number: int
    peer: str
    update: ReplicaUpdate
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToldLoads:
    number: int
    loads: Mapping[str, SharedLoad]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    number: int
    report: Report
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    binding: SharedBinding
    moved_at_s: float
    until_s: float

    def at(self, now: float) -> SharedBinding:
        return replace(self.binding, moved_ago_s=max(0.0, now - self.moved_at_s))


@dataclass(slots=True)
class _Shelf:
    """The state of one pool."""

    told: deque[_Told] = field(default_factory=lambda: deque(maxlen=HISTORY_ENTRIES_MAX))
    loads: dict[str, _ToldLoads] = field(default_factory=dict)
    reports: dict[str, _Reported] = field(default_factory=dict)
    # Numbers all posts in the order in which they were published.
    numbers: int = 0
    bindings: dict[int, _Kept] = field(default_factory=dict)


class MemoryStore:
    """Keeps the shared state of any number of replicas, which use this object; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    async def hear(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        """Return the answer to each question (Store)."""
        return tuple(self._answer(peer, question) for question in questions)

    async def settle(self, claims: Sequence[Claim]) -> tuple[tuple[SharedBinding, ...], ...]:
        """Return the valid bindings (Store)."""
        return tuple(tuple(self._settle(claim, binding) for binding in claim.bindings) for claim in claims)

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        """Publish to the other replicas (Store)."""
        now = self._clock()
        for post in posts:
            shelf = self._shelf(post.pool)
            while shelf.told and shelf.told[0].at_s < now - post.keep_s:
                shelf.told.popleft()
            for silent in [each for each, told in shelf.loads.items() if now - told.at_s >= PEER_TTL_S]:
                del shelf.loads[silent]
            for forgotten in [each for each, told in shelf.reports.items() if now - told.at_s >= REMEMBERED_S]:
                del shelf.reports[forgotten]
            shelf.numbers += 1
            if post.update is not None:
                update = replace(post.update, loads=None, wanted=())
                shelf.told.append(_Told(number=shelf.numbers, peer=peer, update=update, at_s=now))
            if post.loads is not None:
                shelf.loads[peer] = _ToldLoads(number=shelf.numbers, loads=post.loads, at_s=now)
            if post.report is not None:
                shelf.reports[peer] = _Reported(number=shelf.numbers, report=post.report, at_s=now)

    async def close(self) -> None:
        """Do nothing: there are no connections (Store)."""

    def _answer(self, peer: str, question: Question) -> Answer:
        now = self._clock()
        shelf = self._shelf(question.pool)
        after, last_words_after = (0, 0) if question.cursor is None else map(int, question.cursor.split())
        since_s = now - question.window_s if question.cursor is None else -math.inf
        # From the newest: a replica that reads regularly has few new updates, of thousands that are kept.
        new = takewhile(lambda told: told.number > after and told.at_s >= since_s, reversed(shelf.told))
        heard = [told for told in new if told.peer != peer][::-1]
        more, page = len(heard) > PAGE_ENTRIES, heard[:PAGE_ENTRIES]
        kept = (shelf.bindings.get(session) for session in question.wanted)
        return Answer(
            cursor=f"{page[-1].number if more else shelf.numbers} {shelf.numbers}",
            entries=tuple(Entry(peer=told.peer, update=told.update, age_s=now - told.at_s) for told in page),
            loads=tuple(
                LoadEntry(peer=each, loads=told.loads, age_s=now - told.at_s)
                for each, told in shelf.loads.items()
                if told.number > last_words_after and now - told.at_s < PEER_TTL_S and each != peer
            ),
            reports=tuple(
                ReportEntry(peer=each, report=told.report, age_s=now - told.at_s)
                for each, told in shelf.reports.items()
                if told.number > last_words_after and now - told.at_s < REMEMBERED_S and each != peer
            ),
            bindings=tuple(each.at(now) for each in kept if each is not None and each.until_s > now),
            more=more,
        )

    def _settle(self, claim: Claim, binding: SharedBinding) -> SharedBinding:
        now = self._clock()
        bindings = self._shelf(claim.pool).bindings
        moved_at_s = now - binding.moved_ago_s
        held = bindings.get(binding.session)
        if held is not None and held.until_s > now and held.binding.version >= binding.version:
            if (held.binding.version, held.binding.host) != (binding.version, binding.host):
                return held.at(now)
            moved_at_s = held.moved_at_s
        kept = _Kept(binding=binding, moved_at_s=moved_at_s, until_s=now + claim.ttl_s)
        # Moving it to the end keeps the dictionary in order of renewal. Each call removes one expired binding.
        bindings.pop(binding.session, None)
        bindings[binding.session] = kept
        oldest = next(iter(bindings))
        if bindings[oldest].until_s <= now:
            del bindings[oldest]
        return kept.at(now)

    def _shelf(self, pool: str) -> _Shelf:
        return self._shelves.setdefault(pool, _Shelf())
