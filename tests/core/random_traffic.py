"""Random events of a pool's router, the same for several routers, for tests that compare the routers' answers."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Engine, MemberState, Model, Pool, Queue, Routing, Session, SessionMigration
from dualmap.requests import Decision, Effects, Outcome, Queued, Usage
from dualmap.router import PoolRouter

_TOPICS = [builders.text_of(900, f"topic {n}") for n in range(6)]
_ADAPTER = "lora"


def pool_of(chance: random.Random, policy: str) -> Pool:
    """Return a pool of six members with random settings, which may queue requests; a member may leave at 40 s."""
    queueing = chance.random() < 0.7
    routing = Routing(
        policy=policy,
        queue=Queue(dispatch_window_s=chance.choice((0.1, 0.5)) if queueing else inf, max_held=12, max_wait_s=8.0),
        session=Session(migration=SessionMigration(enabled=chance.random() < 0.5, pull=chance.random() < 0.5)),
    )
    engine = Engine(prefill_tokens_per_second=1500.0, kv_tokens=chance.choice((None, 12_000)))
    made = builders.pool(6, engine=engine, routing=routing)
    members = made.members
    if chance.random() < 0.5:
        members = (replace(members[0], state=MemberState.DRAINING, leave_at_s=40.0), *members[1:])
    return replace(made, members=members, model=Model(name=builders.MODEL, adapters=(_ADAPTER,)))


class Traffic:
    """Sends the same random events to several routers, and checks that their answers are equal."""

    def __init__(self, chance: random.Random, routers: Sequence[PoolRouter], *, adapters: bool = True) -> None:
        self.sent = 0
        self._chance = chance
        self._routers = routers
        self._now = 0.0
        self._adapters = ("", "", _ADAPTER) if adapters else ("",)
        self._in_flight: set[str] = set()
        self._queued: set[str] = set()
        for member in routers[0].pool.members:
            models = (builders.MODEL, _ADAPTER) if chance.random() < 0.5 else (builders.MODEL,)
            self._all("on_profile", member.id, EngineProfile(models=models))

    def run(self, events: int) -> None:
        """Send so many events."""
        for _ in range(events):
            self._now += self._chance.choice((0.001, 0.02, 0.1, 0.1, 0.6, 4.0))
            due_s = self._routers[0].next_deadline()
            assert all(each.next_deadline() == due_s for each in self._routers)
            if due_s is not None and due_s <= self._now:
                self._all("on_deadline")
            self._event()
            if self._chance.random() < 0.1:
                updates = [each.take_update(self._now) for each in self._routers]
                assert all(each == updates[0] for each in updates)

    def _event(self) -> None:
        chance, kind = self._chance, self._chance.random()
        if kind < 0.5 or not self._in_flight:
            self._request()
        elif kind < 0.7:
            self._all("on_first_token", chance.choice(sorted(self._in_flight)))
        elif kind < 0.95:
            request_id = chance.choice(sorted(self._in_flight))
            self._in_flight.discard(request_id)
            if chance.random() < 0.8:
                usage = Usage(cached_tokens=chance.choice((0, 512)), completion_tokens=chance.randint(1, 400))
                self._all("on_finished", request_id, usage)
            else:
                self._all(chance.choice(("on_failed", "on_aborted")), request_id)
        elif self._queued:
            request_id = chance.choice(sorted(self._queued))
            self._queued.discard(request_id)
            self._all("on_aborted", request_id)

    def _request(self) -> None:
        self.sent += 1
        chance, name = self._chance, f"r-{self.sent}"
        text = chance.choice(_TOPICS)[: chance.choice((800, 3600))] + builders.text_of(chance.randint(1, 700), name)
        request = builders.request(
            name,
            text,
            now=self._now,
            client=chance.choice((0, 0, 1)),
            subset=frozenset({"10.0.0.2", "10.0.0.3"}) if chance.random() < 0.1 else None,
        )
        request = request._replace(
            streamed=chance.random() < 0.6,
            session=chance.choice((None, None, chance.randint(1, 8))),
            adapter=chance.choice(self._adapters),
        )
        self._queued.add(name)
        self._take(self._all("on_request", request).answer)

    def _all(self, method: str, *arguments: object) -> Effects[Any]:
        """Report an event to every router; return the effects, which must be equal."""
        effects = [getattr(each, method)(self._now, *arguments) for each in self._routers]
        assert all(each == effects[0] for each in effects)
        for outcome in effects[0].outcomes:
            self._take(outcome)
        return effects[0]

    def _take(self, outcome: Outcome) -> None:
        if not isinstance(outcome, Queued):
            self._queued.discard(outcome.request_id)
        if isinstance(outcome, Decision):
            self._in_flight.add(outcome.request_id)
