"""Tests of the engine's features for policies and bounds: priorities, pulled KV, a shared cache, exact backlog."""

from dataclasses import replace

import pytest

from dualmap_sim.engine import Engine, FirstToken
from dualmap_sim.prefix_cache import PrefixCache
from engines import GROWING, ROUND, ask, finishes, first_tokens, run_out

PULLING = replace(ROUND, pull_tokens_per_s=200.0)


def test_engine_queue_serves_by_priority_then_arrival() -> None:
    engine = Engine(ROUND)
    for name, priority in (("running", 9), ("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        engine.submit(0.0, replace(ask(name, prompt=50), priority=priority))

    assert sorted(first_tokens(run_out(engine)).items(), key=lambda item: item[1]) == [
        ("running", 1.0), ("e", 2.0), ("b", 3.0), ("d", 4.0), ("a", 5.0), ("c", 6.0),
    ]  # fmt: skip


def test_urgent_request_overtakes_request_waiting_for_memory() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("big", prompt=100, output=700))
    engine.submit(0.0, ask("too big for now", prompt=200, output=100))
    engine.advance(2.0)

    engine.submit(2.1, replace(ask("urgent", prompt=50), priority=-1))

    assert first_tokens(run_out(engine))["urgent"] == 2.25 + 1.0


def test_pulled_tokens_are_transferred_not_computed_or_loaded() -> None:
    engine = Engine(PULLING)
    engine.submit(0.0, replace(ask("a", prompt=100), pulled_tokens=60))

    (first, _) = run_out(engine)

    assert isinstance(first, FirstToken)
    assert first.at_s == pytest.approx(0.5 + 40 / 100 + 60 / 200)
    assert (first.cached_tokens, first.pulled_tokens) == (0, 60)


def test_pull_fetches_missing_tokens_except_the_last() -> None:
    engine = Engine(PULLING)
    engine.submit(0.0, ask("a", prompt=50, blocks=range(5)))
    engine.submit(0.0, replace(ask("b", prompt=100, blocks=range(10)), pulled_tokens=100))
    engine.submit(0.0, replace(ask("c", prompt=60, blocks=range(6)), pulled_tokens=20))

    firsts = [event for event in run_out(engine) if isinstance(event, FirstToken)]

    assert [(first.cached_tokens, first.pulled_tokens) for first in firsts] == [(0, 0), (50, 49), (50, 0)]
    assert firsts[1].at_s - firsts[1].prefill_started_s == pytest.approx(0.5 + 1 / 100 + 50 / 1000 + 49 / 200)
    assert engine.cached_tokens_total == 100


def test_engine_without_pull_computes_missing_tokens() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, replace(ask("a", prompt=100), pulled_tokens=60))

    (first, _) = run_out(engine)

    assert isinstance(first, FirstToken)
    assert (first.at_s, first.pulled_tokens) == (1.5, 0)


def test_pulled_tokens_cost_attention_like_cached_tokens() -> None:
    costly = replace(PULLING, prefill=replace(ROUND.prefill, attention=0.01))

    pulled_s = costly.prefill_s(new_tokens=10, cached_tokens=30, pulled_tokens=60)

    cached_s = costly.prefill.seconds(new_tokens=10, cached_tokens=90)
    assert pulled_s == pytest.approx(cached_s - 60 / 1000 + 60 / 200)


def test_engines_with_a_shared_cache_reuse_blocks_of_other_engines() -> None:
    cache = PrefixCache(None)
    one, other = Engine(ROUND, cache=cache), Engine(ROUND, cache=cache)
    one.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    run_out(one)

    other.submit(2.0, ask("b", prompt=200, blocks=range(20)))

    (first, _) = run_out(other)
    assert isinstance(first, FirstToken)
    assert first.cached_tokens == 100


def test_engine_can_start_if_queue_is_empty_and_memory_is_free() -> None:
    engine = Engine(ROUND)
    assert engine.could_start(ask("whole memory", prompt=400, output=600))
    engine.submit(0.0, ask("a", prompt=100, output=700))
    assert not engine.could_start(ask("prefilling", prompt=10))

    engine.advance(2.0)

    assert engine.could_start(ask("fits", prompt=150, output=50))
    assert not engine.could_start(ask("does not fit", prompt=150, output=51))
    engine.submit(2.0, ask("b", prompt=150, output=51))
    assert not engine.could_start(ask("behind another", prompt=10))
    assert Engine(replace(ROUND, decode=None)).could_start(ask("no output", prompt=400, output=9999))


def test_engine_backlog_is_current_prefill_plus_queue() -> None:
    engine = Engine(ROUND)
    assert engine.backlog_s(0.0) == 0.0
    engine.submit(1.0, ask("a", prompt=100, blocks=range(10)))
    engine.submit(1.0, replace(ask("b", prompt=50), priority=3))
    engine.submit(1.0, ask("c", prompt=100, blocks=range(10)))
    assert engine.backlog_s(1.25) == 1.25 + 1.0 + 1.5

    # The prompt's blocks are cached now, and "c" computes its last ten tokens.
    assert engine.backlog_s(2.5) == pytest.approx(0.5 + 10 / 100 + 90 / 1000 + 1.0)
    engine.abort(2.5, "b")
    assert engine.backlog_s(2.5) == pytest.approx(0.5 + 10 / 100 + 90 / 1000)


def test_engine_backlog_during_decode_is_the_current_step() -> None:
    engine = Engine(GROWING)
    engine.submit(0.0, ask("a", prompt=50, output=30))

    backlog_s = engine.backlog_s(1.01)
    engine.submit(1.01, ask("b", prompt=50))

    assert 0 < backlog_s < 0.03
    assert first_tokens(run_out(engine))["b"] == pytest.approx(1.01 + backlog_s + 1.0)


def test_reading_engine_backlog_loses_no_event() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50))

    assert engine.backlog_s(5.0) == 0.0
    assert engine.next_event_s() == 5.0
    assert finishes(engine.advance(5.0)) == {"a": 1.0}
