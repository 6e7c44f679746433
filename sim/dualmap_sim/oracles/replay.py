"""The replay that all oracles share: arrivals and engines on one timeline, without a router between them.

A *discipline* selects the instance of each request, with complete knowledge. This module replaces the part of
``cluster`` outside its routers. The module writes the same records and samples and makes the same assertions, so that
bounds and policies are measured alike. A discipline only submits requests; the engine model decides what happens inside
an engine.

``single_queue``, ``full_scan`` and ``all_cached`` are the disciplines, and ``ORACLES`` lists them. ``cluster`` is the
corresponding module with routers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from dualmap_sim import instances
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import EngineRequest, Finished, FirstToken
from dualmap_sim.records import LoadSample, Record
from dualmap_sim.timeline import Timeline


class Instance(instances.Instance):
    """An instance of a cluster, with its predictions for a request."""

    __slots__ = ()

    def prefill_s(self, work: EngineRequest) -> float:
        """Return the duration of a request's prefill on this instance if it began now and alone."""
        cached_tokens = self.engine.cached_tokens(work)
        return self.engine.config.prefill.seconds(
            new_tokens=work.prompt_tokens - cached_tokens, cached_tokens=cached_tokens
        )


HandOver = Callable[[Record, Instance], None]
"""Submits a request to an instance at the current time."""


class Discipline(Protocol):
    """Selects the instance of each request, and submits the request with ``hand_over``."""

    @property
    def instances(self) -> Sequence[Instance]:
        """The instances that serve the requests."""

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Queue or submit a request that arrives."""

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Reconsider the queued requests after an engine ended a prefill or a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleRun:
    """The results of a run: a record of each request in order of arrival, and the samples of the load.

    Samples exclude requests that wait in the common queue of all instances. ``gave_up`` is true if the run was ended
    early.
    """

    records: tuple[Record, ...]
    samples: tuple[LoadSample, ...]
    gave_up: bool


class Replay:
    """One run of a discipline. The replay calls ``gives_up`` at each first token; True ends the run."""

    def __init__(
        self,
        discipline: Discipline,
        *,
        gives_up: Callable[[Record], bool] | None = None,
        sample_s: float | None = None,
    ) -> None:
        self._discipline = discipline
        self._gives_up = gives_up
        self._gave_up = False
        self._sample_s = sample_s
        self._timeline = Timeline()
        self._records: dict[str, Record] = {}
        self._samples: list[LoadSample] = []
        # Requests that arrive after the end of another request, by the other request's id.
        self._followers: dict[str, list[Arrival]] = {}
        self._unfinished = 0

    def run(self, arrivals: Sequence[Arrival]) -> OracleRun:
        """Replay the requests until the last has ended. The arrivals that follow no other request are in order."""
        self._unfinished = len(arrivals)
        for arrival in arrivals:
            if arrival.follows is not None:
                self._followers.setdefault(arrival.follows, []).append(arrival)
        self._first = (arrival for arrival in arrivals if arrival.follows is None)
        self._expect_next()
        if self._sample_s is not None:
            self._timeline.at(0.0, self._sample, self._sample_s, ticks=True)
        while self._unfinished and not self._gave_up:
            assert not self._timeline.is_over, f"{self._unfinished} requests never end"
            self._timeline.step()
        return OracleRun(records=tuple(self._records.values()), samples=tuple(self._samples), gave_up=self._gave_up)

    def _expect_next(self) -> None:
        arrival = next(self._first, None)
        if arrival is not None:
            self._timeline.at(arrival.at_s, self._arrive_in_order, arrival)

    def _arrive_in_order(self, arrival: Arrival) -> None:
        self._expect_next()
        self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        request_id, now = arrival.request_id, self._timeline.now_s
        assert request_id not in self._records, f"two requests are called {request_id}"
        if arrival.follows is not None:
            arrival = replace(arrival, at_s=now)
        record = self._records[request_id] = Record(arrival=arrival, router=0)
        self._discipline.arrive(now, record, self._hand_over)
        record.held = record.dispatched_s is None

    def _hand_over(self, record: Record, instance: Instance) -> None:
        work, now = record.arrival.work, self._timeline.now_s
        assert record.dispatched_s is None, f"{work.request_id} was dispatched twice"
        record.dispatched_s = now
        record.endpoint = instance.member
        instance.submit(now, work, weighed=self._sample_s is not None)
        self._wake(instance)

    def _wake(self, instance: Instance) -> None:
        due_s = instance.engine.next_event_s()
        if due_s is not None and due_s != instance.wakes_s:
            instance.wakes_s = due_s
            self._timeline.at(due_s, self._due, instance)

    def _due(self, instance: Instance) -> None:
        now = self._timeline.now_s
        if instance.wakes_s != now:
            return  # A later call of `_wake` has replaced this wake-up time.
        instance.wakes_s = inf
        events = instance.engine.advance(now)
        for event in events:
            if isinstance(event, FirstToken):
                instance.prefilled(event.request_id)
                self._note_first_token(event)
            else:
                instance.ended(event.request_id)
                self._note_end(event)
        self._wake(instance)
        if events:
            self._discipline.changed(now, self._hand_over)

    def _note_first_token(self, event: FirstToken) -> None:
        record = self._records[event.request_id]
        assert record.first_token_s is None, f"{event.request_id} was prefilled twice"
        record.first_token_s, record.cached_tokens = event.at_s, event.cached_tokens
        if self._gives_up is not None and self._gives_up(record):
            self._gave_up = True

    def _note_end(self, event: Finished) -> None:
        record = self._records[event.request_id]
        assert record.finished_s is None, f"{event.request_id} finished twice"
        record.finished_s = event.at_s
        self._unfinished -= 1
        for follower in self._followers.pop(event.request_id, ()):
            self._timeline.at(event.at_s + follower.pause_s, self._arrive, follower)

    def _sample(self, period_s: float) -> None:
        now = self._timeline.now_s
        pending_tokens = {instance.member: instance.pending_tokens for instance in self._discipline.instances}
        self._samples.append(LoadSample(at_s=now, pending_tokens=pending_tokens))
        self._timeline.at(now + period_s, self._sample, period_s, ticks=True)
