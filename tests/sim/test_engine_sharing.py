"""What an engine offers those who choose between engines: priorities, pulled KV, a shared cache, its true backlog."""

from dataclasses import replace

import pytest

from dualmap_sim.engine import Engine, FirstToken
from dualmap_sim.prefix_cache import PrefixCache
from engines import GROWING, ROUND, ask, finishes, first_tokens, run_out

PULLING = replace(ROUND, pull_tokens_per_s=200.0)


def test_of_those_that_wait_the_lowest_priority_number_goes_first_and_equals_in_order() -> None:
    engine = Engine(ROUND)
    for name, priority in (("running", 9), ("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        engine.submit(0.0, replace(ask(name, prompt=50), priority=priority))

    assert sorted(first_tokens(run_out(engine)).items(), key=lambda item: item[1]) == [
        ("running", 1.0), ("e", 2.0), ("b", 3.0), ("d", 4.0), ("a", 5.0), ("c", 6.0),
    ]  # fmt: skip


def test_a_more_urgent_request_passes_one_that_waits_for_memory() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("big", prompt=100, output=700))
    engine.submit(0.0, ask("too big for now", prompt=200, output=100))
    engine.advance(2.0)

    engine.submit(2.1, replace(ask("urgent", prompt=50), priority=-1))

    assert first_tokens(run_out(engine))["urgent"] == 2.25 + 1.0


def test_pulled_tokens_are_brought_instead_of_computed_and_loaded() -> None:
    engine = Engine(PULLING)
    engine.submit(0.0, replace(ask("a", prompt=100), pulled_tokens=60))

    (first, _) = run_out(engine)

    assert isinstance(first, FirstToken)
    assert first.at_s == pytest.approx(0.5 + 40 / 100 + 60 / 200)
    assert (first.cached_tokens, first.pulled_tokens) == (0, 60)


def test_only_what_the_own_cache_lacks_is_pulled_and_never_the_last_token() -> None:
    engine = Engine(PULLING)
    engine.submit(0.0, ask("a", prompt=50, blocks=range(5)))
    engine.submit(0.0, replace(ask("b", prompt=100, blocks=range(10)), pulled_tokens=100))
    engine.submit(0.0, replace(ask("c", prompt=60, blocks=range(6)), pulled_tokens=20))

    firsts = [event for event in run_out(engine) if isinstance(event, FirstToken)]

    assert [(first.cached_tokens, first.pulled_tokens) for first in firsts] == [(0, 0), (50, 49), (50, 0)]
    assert firsts[1].at_s - firsts[1].prefill_started_s == pytest.approx(0.5 + 1 / 100 + 50 / 1000 + 49 / 200)
    assert engine.cached_tokens_total == 100


def test_an_engine_that_cannot_pull_computes_what_it_lacks() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, replace(ask("a", prompt=100), pulled_tokens=60))

    (first, _) = run_out(engine)

    assert isinstance(first, FirstToken)
    assert (first.at_s, first.pulled_tokens) == (1.5, 0)


def test_what_is_pulled_is_attended_to_as_if_it_were_cached() -> None:
    costly = replace(PULLING, prefill=replace(ROUND.prefill, attention=0.01))

    pulled_s = costly.prefill_s(new_tokens=10, cached_tokens=30, pulled_tokens=60)

    cached_s = costly.prefill.seconds(new_tokens=10, cached_tokens=90)
    assert pulled_s == pytest.approx(cached_s - 60 / 1000 + 60 / 200)


def test_engines_with_one_cache_reuse_what_any_of_them_computed() -> None:
    cache = PrefixCache(None)
    one, other = Engine(ROUND, cache=cache), Engine(ROUND, cache=cache)
    one.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    run_out(one)

    other.submit(2.0, ask("b", prompt=200, blocks=range(20)))

    (first, _) = run_out(other)
    assert isinstance(first, FirstToken)
    assert first.cached_tokens == 100


def test_it_could_start_what_nothing_waits_before_and_fits() -> None:
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


def test_the_backlog_is_the_prefill_under_way_and_those_that_wait() -> None:
    engine = Engine(ROUND)
    assert engine.backlog_s(0.0) == 0.0
    engine.submit(1.0, ask("a", prompt=100, blocks=range(10)))
    engine.submit(1.0, replace(ask("b", prompt=50), priority=3))
    engine.submit(1.0, ask("c", prompt=100, blocks=range(10)))
    assert engine.backlog_s(1.25) == 1.25 + 1.0 + 1.5

    # Its blocks are there now: "c" (next in turn) is computing its last ten tokens.
    assert engine.backlog_s(2.5) == pytest.approx(0.5 + 10 / 100 + 90 / 1000 + 1.0)
    engine.abort(2.5, "b")
    assert engine.backlog_s(2.5) == pytest.approx(0.5 + 10 / 100 + 90 / 1000)


def test_the_backlog_of_a_decoding_engine_is_the_step_under_way() -> None:
    engine = Engine(GROWING)
    engine.submit(0.0, ask("a", prompt=50, output=30))

    backlog_s = engine.backlog_s(1.01)
    engine.submit(1.01, ask("b", prompt=50))

    assert 0 < backlog_s < 0.03
    assert first_tokens(run_out(engine))["b"] == pytest.approx(1.01 + backlog_s + 1.0)


def test_asking_for_the_backlog_loses_no_event() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50))

    assert engine.backlog_s(5.0) == 0.0
    assert engine.next_event_s() == 5.0
    assert finishes(engine.advance(5.0)) == {"a": 1.0}
