"""A cluster in virtual time: routers, engines, and what passes between them, as discrete events on a heap.

The routers are core's ``PoolRouter`` and the engines ``engine.Engine``, the very objects that serve in wall-clock time;
this module drives them, as ``extproc/server.py`` and ``engine_driver.py`` do elsewhere. What production cannot know at
once is late here too: first tokens and ends reach a router after ``feedback_delay_s``, other routers' news after the
exchange's period and delay. Everything follows from the configuration and the arrivals: equal ones give equal records
on any machine.

Neighbours: ``arrivals`` makes what is replayed, ``summary`` measures what came of it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf

from xxhash import xxh3_64_intdigest

from dualmap.news import News, SharedBinding
from dualmap.pool import Pool
from dualmap.requests import Decision, Held, Reason, Refusal, Request, Usage
from dualmap.router import PoolRouter
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import Engine, Finished, FirstToken
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One router: when it begins to take its share of the requests, knowing nothing.

    Unless it is told the news its peers made in the ``replay_s`` seconds before.
    """

    at_s: float = 0.0
    replay_s: float = 0.0


def everything(news: News) -> News:
    """Return the news as it is: what an exchange carries by default."""
    return news


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the routers' news travels: taken every ``period_s``, with the others ``delay_s`` later.

    The delay is half a period by default, since in production they look for news as often as they tell theirs.
    ``carries`` may leave parts out. Bindings go through a store that sees one at a time and answers at once.
    """

    period_s: float = 0.1
    delay_s: float = 0.05
    carries: Callable[[News], News] = everything


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A pool with an engine of one kind behind every member, and the routers before it.

    Without an ``exchange`` the routers share nothing. Each takes an equal share of the requests, drawn by their ids.
    """

    pool: Pool
    engine: EngineConfig
    replicas: tuple[Replica, ...] = (Replica(),)
    exchange: Exchange | None = None
    feedback_delay_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Record:
    """One request's way. Times are None, and ``refused`` is, where that never happened."""

    arrival: Arrival
    router: int
    held: bool = False
    dispatched_s: float | None = None
    endpoint: str | None = None
    rule: str | None = None
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    refused: Reason | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival at the router to the first token; None when there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s


class Cluster:
    """One run of a cluster. ``routers`` may be looked at afterwards."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        shares = config.exchange is not None
        self.routers = tuple(PoolRouter(config.pool, shares=shares) for _ in config.replicas)
        self._engines = {member.endpoint: Engine(config.engine) for member in config.pool.members}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        # What is to come but ticks of the exchange, which go on for ever and would hide that a request was lost.
        self._to_come = 0
        self._now = 0.0
        self._records: dict[str, Record] = {}
        # Requests of whose end their router has not heard, the next one to arrive included.
        self._open = 0
        # When each router and engine will be woken; wake-ups that came to be superseded do nothing.
        self._router_wakes_s = [inf] * len(self.routers)
        self._engine_wakes_s = dict.fromkeys(self._engines, inf)
        self._told: deque[tuple[float, int, News]] = deque()
        self._remembered_s = max(replica.replay_s for replica in config.replicas)
        self._bindings: dict[int, tuple[float, SharedBinding]] = {}

    def run(self, arrivals: Sequence[Arrival]) -> tuple[Record, ...]:
        """Replay requests in order of arrival until the last has ended; return a record of each, in that order."""
        self._arrivals = iter(arrivals)
        self._next_arrival()
        exchange = self._config.exchange
        if exchange is not None:
            for router, replica in enumerate(self._config.replicas):
                # Routers do not tick together; the first tick of one that joins is its replay.
                phase_s = exchange.period_s * router / len(self.routers)
                self._at(replica.at_s, partial(self._replay, router), ticks=True)
                self._at(replica.at_s + phase_s, partial(self._tick, router), ticks=True)
        while self._open:
            assert self._to_come, f"{self._open} requests never end"
            self._now, _, act = heapq.heappop(self._agenda)
            act()
        return tuple(self._records.values())

    def _at(self, at_s: float, act: Callable[[], None], *, ticks: bool = False) -> None:
        if not ticks:
            self._to_come += 1
            act = partial(self._come, act)
        heapq.heappush(self._agenda, (at_s, next(self._order), act))

    def _come(self, act: Callable[[], None]) -> None:
        self._to_come -= 1
        act()

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._open += 1
            self._at(arrival.at_s, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._next_arrival()
        request_id = arrival.request_id
        present = [number for number, replica in enumerate(self._config.replicas) if replica.at_s <= self._now]
        router = present[xxh3_64_intdigest(b"share " + request_id.encode()) % len(present)]
        assert request_id not in self._records, f"two requests are called {request_id}"
        self._records[request_id] = Record(arrival=arrival, router=router)
        request = Request(id=request_id, chain=arrival.chain, arrived_s=self._now, session=arrival.session)
        self._decided(self.routers[router].on_request(self._now, request))
        self._after(router)

    def _decided(self, outcome: Decision | Held | Refusal) -> None:
        record = self._records[outcome.request_id]
        assert record.dispatched_s is None, f"{outcome.request_id} was dispatched twice"
        assert record.refused is None, f"{outcome.request_id} was refused before"
        if isinstance(outcome, Held):
            record.held = True
        elif isinstance(outcome, Refusal):
            record.refused = outcome.reason
            self._open -= 1
        else:
            record.dispatched_s = self._now
            record.endpoint = outcome.endpoints[0]
            record.rule = outcome.receipt.rule
            self._engines[record.endpoint].submit(self._now, record.arrival.work)
            self._wake_engine(record.endpoint)

    def _after(self, router: int) -> None:
        """Collect what a call of a router set free, and see to it that it is woken in time."""
        for outcome in self.routers[router].take_outcomes():
            self._decided(outcome)
        due_s = self.routers[router].next_deadline()
        if due_s is None:
            return
        due_s = max(due_s, self._now)
        if due_s < self._router_wakes_s[router]:
            self._router_wakes_s[router] = due_s
            self._at(due_s, partial(self._router_due, router, due_s))

    def _router_due(self, router: int, due_s: float) -> None:
        if self._router_wakes_s[router] != due_s:
            return
        self._router_wakes_s[router] = inf
        deadline_s = self.routers[router].next_deadline()
        if deadline_s is not None and deadline_s <= self._now:
            self.routers[router].on_deadline(self._now)
        self._after(router)

    def _wake_engine(self, endpoint: str) -> None:
        due_s = self._engines[endpoint].next_event_s()
        if due_s is not None and due_s != self._engine_wakes_s[endpoint]:
            self._engine_wakes_s[endpoint] = due_s
            self._at(due_s, partial(self._engine_due, endpoint, due_s))

    def _engine_due(self, endpoint: str, due_s: float) -> None:
        if self._engine_wakes_s[endpoint] != due_s:
            return
        self._engine_wakes_s[endpoint] = inf
        for event in self._engines[endpoint].advance(self._now):
            heard = self._hear_first_token if isinstance(event, FirstToken) else self._hear_end
            self._note(event)
            self._at(self._now + self._config.feedback_delay_s, partial(heard, self._records[event.request_id]))
        self._wake_engine(endpoint)

    def _note(self, event: FirstToken | Finished) -> None:
        record = self._records[event.request_id]
        if isinstance(event, FirstToken):
            assert record.first_token_s is None, f"{event.request_id} was prefilled twice"
            record.first_token_s, record.cached_tokens = event.at_s, event.cached_tokens
        else:
            assert record.finished_s is None, f"{event.request_id} finished twice"
            record.finished_s = event.at_s

    def _hear_first_token(self, record: Record) -> None:
        self.routers[record.router].on_first_token(self._now, record.arrival.request_id)
        self._after(record.router)

    def _hear_end(self, record: Record) -> None:
        self._open -= 1
        work = record.arrival.work
        usage = Usage(
            prompt_tokens=work.prompt_tokens, completion_tokens=work.output_tokens, cached_tokens=record.cached_tokens
        )
        self.routers[record.router].on_finished(self._now, work.request_id, usage)
        self._after(record.router)

    def _tick(self, router: int) -> None:
        exchange = self._config.exchange
        assert exchange is not None
        self._at(self._now + exchange.period_s, partial(self._tick, router), ticks=True)
        news = exchange.carries(self.routers[router].take_news(self._now))
        if self._remembered_s:
            self._told.append((self._now, router, news))
            while self._told[0][0] < self._now - self._remembered_s:
                self._told.popleft()
        for peer, replica in enumerate(self._config.replicas):
            if peer != router and replica.at_s <= self._now:
                self._at(self._now + exchange.delay_s, partial(self._hear_news, peer, router, news), ticks=True)
        answers = self._store(news)
        if answers:
            self._at(self._now + exchange.delay_s, partial(self._hear_bindings, router, answers), ticks=True)

    def _store(self, news: News) -> tuple[SharedBinding, ...]:
        """Answer what is wanted, then compare and set: the newer version holds, of equal ones the first.

        Return what was wanted and known, and the winners over what was not set.
        """
        answers = [self._bindings[session] for session in news.wanted if session in self._bindings]
        for binding in news.bindings:
            held = self._bindings.get(binding.session)
            if held is None or held[1].version < binding.version:
                self._bindings[binding.session] = (self._now, binding)
            elif held[1].host != binding.host:
                answers.append(held)
        return tuple(
            replace(binding, moved_ago_s=binding.moved_ago_s + self._now - stored_s) for stored_s, binding in answers
        )

    def _hear_news(self, router: int, peer: int, news: News) -> None:
        delay_s = self._config.exchange.delay_s if self._config.exchange is not None else 0.0
        self.routers[router].on_news(self._now, f"router-{peer}", news, delay_s)
        self._after(router)

    def _hear_bindings(self, router: int, bindings: tuple[SharedBinding, ...]) -> None:
        self.routers[router].on_bindings(self._now, bindings)
        self._after(router)

    def _replay(self, router: int) -> None:
        since_s = self._now - self._config.replicas[router].replay_s
        for told_s, peer, news in self._told:
            if told_s > since_s:
                self.routers[router].on_news(self._now, f"router-{peer}", news, self._now - told_s)
        self._after(router)
