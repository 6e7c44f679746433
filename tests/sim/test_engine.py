"""Tests of the engine model's steps: queueing, memory, cache, decode and aborts, with calculated times."""

from dataclasses import replace

import pytest

from dualmap_sim.engine import Engine, FirstToken
from dualmap_sim.errors import RequestDoesNotFit
from engines import GROWING, ROUND, ask, finishes, first_tokens, run_out


def test_first_token_is_sent_at_the_end_of_prefill() -> None:
    engine = Engine(ROUND)
    engine.submit(3.0, ask("a", prompt=100, output=5))

    events = run_out(engine)

    assert first_tokens(events) == {"a": 4.5}
    assert finishes(events) == {"a": 5.5}
    assert isinstance(events[0], FirstToken)
    assert (events[0].arrived_s, events[0].prefill_started_s) == (3.0, 3.0)


def test_prefills_run_one_at_a_time_in_order_before_decodes() -> None:
    engine = Engine(ROUND)
    for name in "abc":
        engine.submit(0.0, ask(name, prompt=50, output=3))

    events = run_out(engine)

    assert first_tokens(events) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert finishes(events) == {"a": 3.5, "b": 3.5, "c": 3.5}


def test_arriving_prompt_runs_after_the_current_decode_step() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50, output=9))
    assert first_tokens(engine.advance(1.1)) == {"a": 1.0}

    engine.submit(1.1, ask("b", prompt=50))

    assert engine.next_event_s() == 1.25
    events = run_out(engine)
    assert first_tokens(events) == {"b": 2.25}
    assert finishes(events) == {"b": 2.25, "a": 4.0}


def test_prompt_arriving_at_a_step_boundary_starts_at_once() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50, output=9))

    engine.submit(1.5, ask("b", prompt=50))

    assert first_tokens(run_out(engine)) == {"a": 1.0, "b": 2.5}


def test_decode_step_time_grows_with_batch_size_and_kv_tokens() -> None:
    engine = Engine(GROWING)
    engine.submit(0.0, ask("a", prompt=100, output=4))
    engine.submit(0.0, ask("b", prompt=200, output=2))

    events = run_out(engine)

    assert GROWING.decode is not None
    weights_s, kv_s, request_s = (
        GROWING.decode.step_s,
        GROWING.decode.per_kv_token_s,
        GROWING.decode.per_request_s,
    )
    prefilled = 1.5 + 2.5
    both = weights_s + kv_s * (101 + 201) + request_s * 2
    alone = 2 * weights_s + kv_s * (102 + 103) + request_s * 2
    assert finishes(events) == pytest.approx({"b": prefilled + both, "a": prefilled + both + alone})


def test_prefill_only_engine_ends_request_at_the_first_token() -> None:
    engine = Engine(replace(ROUND, decode=None))
    engine.submit(0.0, ask("a", prompt=50, output=100))

    events = run_out(engine)

    assert first_tokens(events) == finishes(events) == {"a": 1.0}
    assert engine.kv_tokens_reserved == 0


def test_cached_blocks_are_loaded_instead_of_computed() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    engine.submit(0.0, ask("b", prompt=100, blocks=[*range(5), *range(90, 95)]))

    events = run_out(engine)

    assert first_tokens(events) == {"a": 1.5, "b": 1.5 + 0.5 + 50 / 100 + 50 / 1000}
    assert [event.cached_tokens for event in events if isinstance(event, FirstToken)] == [0, 50]
    assert (engine.prompt_tokens_total, engine.cached_tokens_total) == (200, 50)


def test_blocks_enter_the_cache_at_the_end_of_prefill() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))

    engine.advance(1.49)
    assert engine.cached_tokens(ask("b", prompt=200, blocks=range(20))) == 0
    engine.advance(1.5)
    assert engine.cached_tokens(ask("b", prompt=200, blocks=range(20))) == 100


def test_last_prompt_token_is_computed_even_if_cached() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    run_out(engine)

    assert engine.cached_tokens(ask("b", prompt=100, blocks=range(10))) == 90
    assert engine.cached_tokens(ask("b", prompt=101, blocks=range(11))) == 100


def test_incomplete_last_block_is_not_cached() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=95, blocks=range(10)))
    run_out(engine)

    assert len(engine.cache) == 9


def test_first_queued_request_without_memory_blocks_the_queue() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("big", prompt=100, output=700))
    engine.submit(0.0, ask("too big for now", prompt=200, output=100))
    engine.submit(0.0, ask("small", prompt=10, output=1))

    before = engine.advance(100.0)
    assert first_tokens(before) == {"big": 1.5}
    assert (engine.running, engine.waiting) == (1, 2)

    events = run_out(engine)
    free_s = 1.5 + 699 * 0.25
    assert finishes(events)["big"] == free_s
    assert first_tokens(events) == {"too big for now": free_s + 2.5, "small": free_s + 2.5 + 0.6}


def test_request_that_never_fits_is_rejected_without_effect() -> None:
    engine = Engine(ROUND)

    with pytest.raises(RequestDoesNotFit, match=r"need 1001 tokens .* has 1000"):
        engine.submit(0.0, ask("a", prompt=500, output=501))
    assert engine.next_event_s() is None
    assert engine.waiting == 0


def test_kv_usage_counts_tokens_in_use_and_reserved_tokens() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, output=20))
    seen = []
    for now in (0.0, 1.5, 1.75, 2.6, 7.0):
        engine.advance(now)
        seen.append((engine.kv_tokens_held, engine.kv_tokens_reserved))

    assert seen == [(100, 120), (101, 120), (102, 120), (105, 120), (0, 0)]


def test_engine_token_count_is_correct_between_events() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50, output=9))
    (first,) = engine.advance(1.0)
    assert isinstance(first, FirstToken)

    shown = []
    while engine.next_event_s() is not None:
        step_s = engine.next_step_s()
        assert step_s is not None
        engine.advance(step_s)
        shown.append((step_s, 1 + engine.decode_steps - first.decode_step))
    assert shown == [(1.0 + 0.25 * step, 1 + step) for step in range(1, 9)]
    assert engine.generated_tokens_total == 9


def test_abort_of_waiting_request_starts_the_next_request() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("big", prompt=100, output=700))
    engine.submit(0.0, ask("too big for now", prompt=200, output=100))
    engine.submit(0.0, ask("small", prompt=50, output=1))

    assert engine.abort(2.1, "too big for now")

    assert engine.waiting == 1
    events = run_out(engine)
    assert first_tokens(events)["small"] == 2.25 + 1.0
    assert set(finishes(events)) == {"big", "small"}


def test_abort_of_later_queued_request_removes_no_other_request() -> None:
    engine = Engine(ROUND)
    for name in "abc":
        engine.submit(0.0, ask(name, prompt=50))

    assert engine.abort(0.5, "b")

    assert engine.waiting == 1
    assert first_tokens(run_out(engine)) == {"a": 1.0, "c": 2.0}


def test_abort_during_prefill_stops_prefill_and_caches_nothing() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, blocks=range(10)))
    engine.submit(0.0, ask("b", prompt=50))

    assert engine.abort(0.7, "a")

    assert first_tokens(run_out(engine)) == {"b": 1.7}
    assert len(engine.cache) == 0
    assert engine.kv_tokens_reserved == 0


def test_abort_during_decode_frees_memory_at_step_end() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, output=700))
    engine.submit(0.0, ask("b", prompt=300, output=100))
    engine.advance(1.5)

    assert engine.abort(2.1, "a")
    assert engine.kv_tokens_reserved == 800

    events = run_out(engine)
    assert first_tokens(events) == {"b": 2.25 + 3.5}
    assert set(finishes(events)) == {"b"}
    assert (engine.kv_tokens_held, engine.kv_tokens_reserved, engine.running) == (0, 0, 0)


def test_abort_of_decode_during_another_prefill_frees_memory_at_once() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=100, output=50))
    engine.submit(0.0, ask("b", prompt=100, output=50))
    engine.advance(2.0)

    assert engine.abort(2.0, "a")

    assert engine.kv_tokens_reserved == 150
    assert set(finishes(run_out(engine))) == {"b"}


def test_abort_of_finished_request_has_no_effect() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=50))

    assert not engine.abort(1.0, "a")
    assert not engine.abort(1.0, "never seen")
    assert finishes(engine.advance(1.0)) == {"a": 1.0}


def test_engine_rejects_time_before_the_current_time() -> None:
    engine = Engine(ROUND)
    engine.advance(1.0)

    with pytest.raises(AssertionError, match="time went back"):
        engine.advance(0.5)
