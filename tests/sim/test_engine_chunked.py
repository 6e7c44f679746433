"""Tests of chunked prefill with calculated times; test_engine_properties.py compares the model with a simple engine."""

from dataclasses import replace

import pytest

from dualmap_sim.engine import Engine, FirstToken
from engines import ROUND, ask, finishes, first_tokens, run_out

CHUNKED = replace(ROUND, chunk_tokens=40)
"""A step takes 0.5 s plus 0.01 s for each of at most 40 prompt tokens, and 0.25 s without prompt tokens."""


def test_chunked_prompt_has_the_overhead_in_each_chunk() -> None:
    engine = Engine(CHUNKED)
    engine.submit(3.0, ask("a", prompt=100, output=5))

    events = run_out(engine)

    assert first_tokens(events) == {"a": pytest.approx(3.0 + 3 * 0.5 + 100 / 100)}
    assert finishes(events) == {"a": pytest.approx(5.5 + 4 * 0.25)}


def test_chunked_prompt_has_the_attention_cost_of_a_whole_prefill() -> None:
    costly = replace(CHUNKED, prefill=replace(ROUND.prefill, attention=0.01))
    engine = Engine(costly)
    engine.submit(0.0, ask("a", prompt=100))

    in_one_s = costly.prefill.seconds(new_tokens=100, cached_tokens=0)
    assert first_tokens(run_out(engine)) == {"a": pytest.approx(in_one_s + 2 * 0.5)}


def test_prompt_that_fits_a_step_costs_as_much_as_a_whole_prefill() -> None:
    engine = Engine(replace(CHUNKED, chunk_tokens=1000))
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    run_out(engine)
    engine.submit(2.0, ask("b", prompt=200, output=4, blocks=range(20)))

    events = run_out(engine)

    assert first_tokens(events) == {"b": pytest.approx(2.0 + 0.5 + 100 / 100 + 100 / 1000)}
    assert finishes(events) == {"b": pytest.approx(3.6 + 3 * 0.25)}


def test_step_with_remaining_tokens_starts_the_next_prompt() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("a", prompt=30))
    engine.submit(0.0, ask("b", prompt=10))
    engine.submit(0.0, ask("c", prompt=50))
    engine.submit(0.0, ask("d", prompt=10))

    # The first step has only "a". The second step has "b" and 30 tokens of "c". The third step has the other 20 tokens
    # and "d".
    assert first_tokens(run_out(engine)) == pytest.approx({"a": 0.8, "b": 1.7, "c": 2.5, "d": 2.5})


def test_decodes_use_step_tokens_before_the_prompt() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("a", prompt=20, output=9))
    assert first_tokens(engine.advance(0.7)) == {"a": 0.7}

    engine.submit(0.7, ask("b", prompt=50, output=2))

    # The steps have 39 tokens beside the decode, then 11; the fixed 0.5 s of the prefill includes the decode's 0.25 s.
    assert first_tokens(engine.advance(2.21)) == {"b": pytest.approx(0.7 + 0.89 + 0.61)}
    assert engine.decode_steps == 2
    assert finishes(run_out(engine)) == {"b": pytest.approx(2.45), "a": pytest.approx(2.2 + 6 * 0.25)}


def test_mixed_step_costs_the_larger_fixed_and_all_variable_costs() -> None:
    assert ROUND.decode is not None
    config = replace(CHUNKED, decode=replace(ROUND.decode, step_s=0.6, per_kv_token_s=0.001, per_request_s=0.01))
    engine = Engine(config)
    engine.submit(0.0, ask("a", prompt=20, output=9))
    engine.submit(0.0, ask("b", prompt=10))

    # The decode of "a" reads 21 tokens; "b" arrived after the begin of the first step.
    assert first_tokens(run_out(engine))["b"] == pytest.approx(0.7 + 0.6 + 0.021 + 0.01 + 10 / 100)


def test_prompts_wait_while_decodes_fill_the_step() -> None:
    engine = Engine(replace(CHUNKED, chunk_tokens=2))
    for name in "ab":
        engine.submit(0.0, ask(name, prompt=2, output=9))
    started = engine.advance(1.1)
    assert first_tokens(started) == {"a": 0.52}

    engine.submit(1.1, ask("c", prompt=4))

    events = [*started, *run_out(engine)]
    assert first_tokens(events)["c"] > finishes(events)["a"]


def test_blocks_are_reused_in_the_step_that_completes_the_blocks() -> None:
    engine = Engine(replace(CHUNKED, chunk_tokens=150))
    engine.submit(0.0, ask("first", prompt=10))
    for name in "ab":
        engine.submit(0.0, ask(name, prompt=120, blocks=range(12)))

    events = run_out(engine)

    assert [event.cached_tokens for event in events if isinstance(event, FirstToken)] == [0, 0, 110]
    assert first_tokens(events)["a"] == first_tokens(events)["b"] == pytest.approx(0.6 + 0.5 + 130 / 100 + 110 / 1000)


def test_pulled_and_cached_tokens_use_no_step_budget() -> None:
    engine = Engine(replace(CHUNKED, pull_tokens_per_s=200.0))
    engine.submit(0.0, replace(ask("a", prompt=140), pulled_tokens=60))

    assert first_tokens(run_out(engine)) == {"a": pytest.approx(2 * 0.5 + 80 / 100 + 60 / 200)}


def test_prompt_without_memory_waits_despite_step_budget() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("big", prompt=100, output=700))
    engine.submit(0.0, ask("too big for now", prompt=200, output=100))
    engine.submit(0.0, ask("small", prompt=10))

    events = run_out(engine)

    firsts = {event.request_id: event for event in events if isinstance(event, FirstToken)}
    assert firsts["too big for now"].prefill_started_s == finishes(events)["big"]
    assert firsts["small"].at_s >= firsts["too big for now"].at_s


def test_prefill_only_engine_splits_prompts_into_chunks() -> None:
    engine = Engine(replace(CHUNKED, decode=None))
    engine.submit(0.0, ask("a", prompt=60, output=50))
    engine.submit(0.0, ask("b", prompt=20, output=50))

    events = run_out(engine)

    assert first_tokens(events) == finishes(events) == {"a": pytest.approx(1.8), "b": pytest.approx(1.8)}
    assert engine.kv_tokens_reserved == 0


def test_decode_steps_with_equal_batch_are_a_single_event() -> None:
    engine = Engine(replace(CHUNKED, kv_memory_tokens=1_000_000))
    engine.submit(0.0, ask("a", prompt=20, output=400_001))
    engine.advance(0.7)

    assert engine.next_event_s() == pytest.approx(0.7 + 400_000 * 0.25)
    assert engine.next_step_s() == pytest.approx(0.95)


def test_abort_of_partial_prompt_ends_step_and_caches_nothing() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    engine.submit(0.0, ask("b", prompt=20))

    assert engine.abort(0.3, "a")
    assert engine.kv_tokens_reserved == 101

    assert first_tokens(run_out(engine)) == {"b": pytest.approx(0.9 + 0.7)}
    assert (len(engine.cache), engine.kv_tokens_reserved, engine.running) == (0, 0, 0)


def test_abort_in_mixed_step_frees_memory_at_step_end() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("a", prompt=20, output=9))
    engine.advance(0.7)
    engine.submit(0.7, ask("b", prompt=30, output=9))

    assert engine.abort(0.8, "a")
    assert engine.kv_tokens_reserved == 29 + 39

    assert first_tokens(engine.advance(1.5)) == {"b": pytest.approx(1.5)}
    assert engine.kv_tokens_reserved == 39


def test_backlog_equals_the_steps_of_queued_requests() -> None:
    engine = Engine(CHUNKED)
    engine.submit(0.0, ask("a", prompt=100))
    engine.submit(0.0, ask("b", prompt=30))

    # The current step takes 0.9 s. 60 and 30 tokens remain: two full steps, and a third step with free tokens.
    backlog_s = engine.backlog_s(0.0)
    engine.submit(0.0, ask("c", prompt=10))

    assert backlog_s == pytest.approx(0.9 + 2 * 0.5 + 80 / 100)
    started = {event.request_id: event.prefill_started_s for event in run_out(engine) if isinstance(event, FirstToken)}
    assert started["c"] == pytest.approx(backlog_s)
