"""Tests that the engine model equals a simple model with every decode step, and that invariants always hold."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest
from dualmap_sim.presets import EngineConfig, PrefillCost
from engines import GROWING, ask, finishes, first_tokens, run_out

TIGHT = replace(GROWING, kv_memory_tokens=220, cache_tokens=80)
CROOKED = PrefillCost(overhead_s=0.50137, tokens_per_s=97.131, attention=1.7e-3, load_tokens_per_s=1013.3)
CHUNKED = replace(TIGHT, prefill=CROOKED, chunk_tokens=13)
FEW = replace(CHUNKED, chunk_tokens=2)
"""A step has so few tokens that decodes use all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    request: EngineRequest
    abort_after_s: float | None


@st.composite
def arrivals(draw: st.DrawFn, *, aborts: bool) -> list[Arrival]:
    """Up to 15 requests within a few seconds, with prompts from a small tree of blocks."""
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
    """A second, simple implementation of docs/engine-model.md, with lists and every single step."""

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


@dataclass(slots=True, kw_only=True)
class NaiveChunked:
    """A second implementation of the rules of ``chunked.py``, with every single step."""

    config: EngineConfig
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def run(self, todo: list[Arrival]) -> None:
        config, decode = self.config, self.config.decode
        assert decode is not None
        assert config.chunk_tokens is not None
        now, queue = 0.0, [arrival.request for arrival in todo]
        arrived = {arrival.request.request_id: arrival.at_s for arrival in todo}
        admitted: dict[str, list[int]] = {}  # request id -> prompt tokens left, KV held, output tokens left
        cache: list[int] = []  # oldest first
        needs = {request.request_id: request.prompt_tokens + request.output_tokens for request in queue}
        while queue or admitted:
            decoding = [state for state in admitted.values() if not state[0]]
            room = config.chunk_tokens - len(decoding)
            kv, prompts_s, computes = sum(state[1] for state in decoding), 0.0, False
            for name, state in admitted.items():
                if state[0] and room > 0:
                    tokens = min(room, state[0])
                    prompts_s += config.prefill.compute_s(new_tokens=tokens, cached_tokens=state[1])
                    state[0], state[1], room, computes = state[0] - tokens, state[1] + tokens, room - tokens, True
                    if not state[0]:
                        self.first[name] = -1
                        whole = list(next(a for a in todo if a.request.request_id == name).request.blocks)
                        cache = ([b for b in cache if b not in whole] + whole[::-1])[-8:]
            # A request at an idle engine begins a step at once; other requests that arrive at the same time wait for
            # the next step.
            idle = not admitted and arrived[queue[0].request_id] >= now
            now = arrived[queue[0].request_id] if idle else now
            while queue and room > 0 and (idle or arrived[queue[0].request_id] < now):
                request = queue[0]
                if sum(needs[name] for name in admitted) + needs[request.request_id] > config.kv_memory_tokens:
                    break
                queue.pop(0)
                idle = False
                whole, hit = list(request.blocks), 0
                while hit < min(len(whole), (request.prompt_tokens - 1) // 10) and whole[hit] in cache:
                    hit += 1
                tokens = min(room, request.prompt_tokens - 10 * hit)
                prompts_s += 10 * hit / config.prefill.load_tokens_per_s
                prompts_s += config.prefill.compute_s(new_tokens=tokens, cached_tokens=10 * hit)
                held = 10 * hit + tokens
                admitted[request.request_id] = [request.prompt_tokens - held, held, request.output_tokens]
                room, computes = room - tokens, True
                if held == request.prompt_tokens:
                    self.first[request.request_id] = -1
                    cache = ([b for b in cache if b not in whole] + whole[::-1])[-8:]
            now += prompts_s + self._shared_s(len(decoding), kv, computes)
            for state in decoding:
                state[1:] = [state[1] + 1, state[2] - 1]
            for name, at_s in self.first.items():
                if at_s == -1:
                    self.first[name] = now
                    admitted[name][1:] = [admitted[name][1] + 1, admitted[name][2] - 1]
            for name in [name for name, (_, _, left) in admitted.items() if not left]:
                self.last[name] = now
                del admitted[name]

    def _shared_s(self, decoding: int, kv: int, computes: bool) -> float:
        decode, overhead_s = self.config.decode, self.config.prefill.overhead_s
        assert decode is not None
        if not decoding:
            return overhead_s
        grows_s = decode.per_kv_token_s * kv + decode.per_request_s * decoding
        return grows_s + (max(overhead_s, decode.step_s) if computes else decode.step_s)


@given(todo=arrivals(aborts=False), config=st.sampled_from([CHUNKED, FEW]))
@settings(max_examples=300)
def test_chunked_steps_combined_equal_single_steps(todo: list[Arrival], config: EngineConfig) -> None:
    naive = NaiveChunked(config=config)
    naive.run(todo)
    engine = Engine(config)
    for arrival in todo:
        engine.submit(arrival.at_s, arrival.request)
    events = run_out(engine)

    assert first_tokens(events) == pytest.approx(naive.first)
    assert finishes(events) == pytest.approx(naive.last)


@given(todo=arrivals(aborts=False))
@settings(max_examples=200)
def test_skipped_decode_steps_equal_single_steps(todo: list[Arrival]) -> None:
    naive = Naive(config=TIGHT)
    naive.run(todo)
    engine = Engine(TIGHT)
    events: list[EngineEvent] = []
    for arrival in todo:
        engine.submit(arrival.at_s, arrival.request)
    events += run_out(engine)

    assert first_tokens(events) == pytest.approx(naive.first)
    assert finishes(events) == pytest.approx(naive.last)


CONFIGS = st.sampled_from([TIGHT, CHUNKED, FEW])


def play(
    config: EngineConfig, todo: list[Arrival], *, polls: list[float]
) -> tuple[list[EngineEvent], set[str], Engine]:
    """Run arrivals, aborts and polls in the order of time; return events, aborted requests, and the engine."""
    engine = Engine(config)
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


@given(config=CONFIGS, todo=arrivals(aborts=True))
@settings(max_examples=200)
def test_engine_ends_each_request_once_and_frees_all_memory(config: EngineConfig, todo: list[Arrival]) -> None:
    events, aborted, engine = play(config, todo, polls=[])

    ended = [event.request_id for event in events if event.request_id in finishes([event])]
    assert sorted([*ended, *aborted]) == sorted(arrival.request.request_id for arrival in todo)
    assert (engine.waiting, engine.running, engine.kv_tokens_held, engine.kv_tokens_reserved) == (0, 0, 0, 0)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)


@given(config=CONFIGS, todo=arrivals(aborts=True), polls=st.lists(st.floats(0, 30), max_size=40))
@settings(max_examples=200)
def test_reading_engine_state_does_not_change_the_engine(
    config: EngineConfig, todo: list[Arrival], polls: list[float]
) -> None:
    unwatched = play(config, todo, polls=[])
    watched = play(config, todo, polls=polls)

    assert watched[:2] == unwatched[:2]


@given(config=CONFIGS, todo=arrivals(aborts=True), polls=st.lists(st.floats(0, 30), max_size=40))
@settings(max_examples=100)
def test_engine_memory_is_never_overcommitted(config: EngineConfig, todo: list[Arrival], polls: list[float]) -> None:
    engine = Engine(config)
    for arrival in todo:
        engine.submit(arrival.at_s, arrival.request)
        assert engine.kv_tokens_held <= engine.kv_tokens_reserved <= config.kv_memory_tokens
    for at_s in sorted(polls):
        engine.advance(max(at_s, engine.now_s))
        assert engine.kv_tokens_held <= engine.kv_tokens_reserved <= config.kv_memory_tokens
