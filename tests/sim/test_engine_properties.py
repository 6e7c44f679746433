"""The engine model against a naive one that takes every decode step, and what must hold whatever arrives when."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest
from dualmap_sim.presets import EngineConfig
from engines import GROWING, ask, finishes, first_tokens, run_out

TIGHT = replace(GROWING, kv_memory_tokens=220, cache_tokens=80)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    request: EngineRequest
    abort_after_s: float | None


@st.composite
def arrivals(draw: st.DrawFn, *, aborts: bool) -> list[Arrival]:
    """Up to 15 requests over a few seconds, their prompts paths in a small tree of blocks."""
    drawn = []
    now = 0.0
    for number in range(draw(st.integers(1, 15))):
        now += draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]) | st.floats(0, 3))
        path = draw(st.lists(st.integers(0, 1), max_size=8))
        blocks = [int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))]
        prompt = 10 * len(path) + draw(st.integers(1, 9))
        output = draw(st.integers(1, 60))
        abort = draw(st.none() | st.floats(0, 4)) if aborts else None
        request = ask(str(number), prompt=prompt, output=output, blocks=blocks)
        drawn.append(Arrival(at_s=now, request=request, abort_after_s=abort))
    return drawn


@dataclass(slots=True, kw_only=True)
class Naive:
    """ALGORITHMS section 7 written down once more: one list each, every step taken, no shortcut."""

    config: EngineConfig
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def run(self, todo: list[Arrival]) -> None:
        config = self.config
        assert config.decode is not None
        now, queue, batch = 0.0, list(todo), dict[str, list[int]]()
        cache: list[int] = []  # oldest first
        needs = {a.request.request_id: a.request.prompt_tokens + a.request.output_tokens for a in todo}
        while queue or batch:
            head = queue[0] if queue and queue[0].at_s <= now else None
            used = sum(needs[name] for name in batch)
            if head and used + needs[head.request.request_id] <= config.kv_memory_tokens:
                request = queue.pop(0).request
                whole = list(request.blocks)
                hit = 0
                while hit < len(whole) and whole[hit] in cache:
                    hit += 1
                cached = min(hit, (request.prompt_tokens - 1) // config.block_tokens) * config.block_tokens
                now += config.prefill.seconds(new_tokens=request.prompt_tokens - cached, cached_tokens=cached)
                cache = [b for b in cache if b not in whole] + whole[::-1]
                cache = cache[-(config.cache_tokens // config.block_tokens) :]
                self.first[request.request_id] = now
                batch[request.request_id] = [request.prompt_tokens + 1, request.output_tokens - 1]
            elif batch:
                now += config.decode.steps_s(1, requests=len(batch), kv_tokens=sum(held for held, _ in batch.values()))
                for state in batch.values():
                    state[0] += 1
                    state[1] -= 1
            else:
                now = queue[0].at_s
            for name in [name for name, (_, left) in batch.items() if left == 0]:
                self.last[name] = now
                del batch[name]


@given(todo=arrivals(aborts=False))
@settings(max_examples=200)
def test_skipping_over_steps_gives_the_times_of_taking_each(todo: list[Arrival]) -> None:
    naive = Naive(config=TIGHT)
    naive.run(todo)
    engine = Engine(TIGHT)
    events: list[EngineEvent] = []
    for arrival in todo:
        engine.submit(arrival.at_s, arrival.request)
    events += run_out(engine)

    assert first_tokens(events) == pytest.approx(naive.first)
    assert finishes(events) == pytest.approx(naive.last)


def play(todo: list[Arrival], *, polls: list[float]) -> tuple[list[EngineEvent], set[str], Engine]:
    """Play arrivals, aborts and polls in order of time; return events, the requests aborted, and the engine."""
    engine = Engine(TIGHT)
    happenings: list[tuple[float, int, Arrival | str | None]] = [(a.at_s, 0, a) for a in todo]
    happenings += [(a.at_s + a.abort_after_s, 1, a.request.request_id) for a in todo if a.abort_after_s is not None]
    happenings += [(at_s, 2, None) for at_s in polls]
    events: list[EngineEvent] = []
    aborted = set()
    for at_s, _, happening in sorted(happenings, key=lambda h: h[:2]):
        if isinstance(happening, Arrival):
            engine.submit(at_s, happening.request)
        elif isinstance(happening, str):
            if engine.abort(at_s, happening):
                aborted.add(happening)
        else:
            events += engine.advance(at_s)
            _ = engine.decode_steps, engine.next_step_s(), engine.kv_tokens_held
    return events + run_out(engine), aborted, engine


@given(todo=arrivals(aborts=True))
@settings(max_examples=200)
def test_every_request_ends_exactly_once_and_leaves_nothing_behind(todo: list[Arrival]) -> None:
    events, aborted, engine = play(todo, polls=[])

    ended = [event.request_id for event in events if event.request_id in finishes([event])]
    assert sorted([*ended, *aborted]) == sorted(arrival.request.request_id for arrival in todo)
    assert (engine.waiting, engine.running, engine.kv_tokens_held, engine.kv_tokens_reserved) == (0, 0, 0, 0)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)


@given(todo=arrivals(aborts=True), polls=st.lists(st.floats(0, 30), max_size=40))
@settings(max_examples=200)
def test_being_watched_changes_nothing(todo: list[Arrival], polls: list[float]) -> None:
    unwatched = play(todo, polls=[])
    watched = play(todo, polls=polls)

    assert watched[:2] == unwatched[:2]


@given(todo=arrivals(aborts=True), polls=st.lists(st.floats(0, 30), max_size=40))
@settings(max_examples=100)
def test_memory_is_never_overcommitted(todo: list[Arrival], polls: list[float]) -> None:
    engine = Engine(TIGHT)
    for arrival in todo:
        engine.submit(arrival.at_s, arrival.request)
        assert engine.kv_tokens_held <= engine.kv_tokens_reserved <= TIGHT.kv_memory_tokens
    for at_s in sorted(polls):
        engine.advance(max(at_s, engine.now_s))
        assert engine.kv_tokens_held <= engine.kv_tokens_reserved <= TIGHT.kv_memory_tokens
