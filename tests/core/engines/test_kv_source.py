from collections.abc import Iterable
from random import Random

import pytest

from dualmap.engines.source import (
    ATTEMPTS_MAX,
    BACKOFF_S,
    JITTER_S,
    MESSAGE_BYTES_MAX,
    PLACE_S,
    QUEUE_BYTES,
    QUEUE_MESSAGES,
    REPLAY_S,
    REPLAYS_IN_SUCCESSION,
    REPLAYS_MAX,
    RETRY_S,
    SILENCE_S,
    Apply,
    Clear,
    Effect,
    EventSource,
    ForgetCopies,
    Message,
    ReplayEnd,
    SourceState,
    read_frames,
    replays_to_begin,
)

END = ReplayEnd.END


def message(number: int) -> Message:
    return Message(number, b"%d" % number)


def numbers(effects: Iterable[Effect]) -> list[int | str]:
    """Return the numbers of the applied messages, "clear" for each clear, and "copies" for forgotten copies."""
    names = {Clear(): "clear", ForgetCopies(): "copies"}
    return [each.message.number if isinstance(each, Apply) else names[each] for each in effects]


def live(source: EventSource, *sent: int, now: float = 10.0) -> list[int | str]:
    return [each for number in sent for each in numbers(source.on_live(now, message(number)))]


def replay(source: EventSource, *sent: int | ReplayEnd, now: float = 10.0, start: int | None = None) -> list[int | str]:
    """Begin the wanted replay and pass the answers."""
    assert source.replay_wanted_s is not None
    wanted = source.begin_replay(now)
    assert start is None or wanted.start == start
    answers = [message(each) if isinstance(each, int) else each for each in sent]
    return [each for answer in answers for each in numbers(source.on_replayed(now, wanted.attempt, answer))]


def started(*history: int) -> EventSource:
    """Return a live source that has replayed the messages."""
    source = EventSource(replays=True)
    source.start(0.0)
    assert replay(source, *history, END) == list(history)
    assert source.state is SourceState.LIVE
    return source


def without_replays() -> EventSource:
    source = EventSource(replays=False)
    source.start(0.0)
    return source


def test_source_is_off_until_it_starts() -> None:
    source = EventSource(replays=True)
    assert (source.state, live(source, 0)) == (SourceState.OFF, [])


def test_source_replays_from_the_start_and_is_live() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    assert source.state is SourceState.SYNCING
    assert replay(source, 0, 1, 2, END, start=0) == [0, 1, 2]
    assert (source.state, source.sequence, source.reason) == (SourceState.LIVE, 2, "")
    assert live(source, 3, 4) == [3, 4]


def test_source_of_a_silent_engine_is_live_after_an_empty_replay() -> None:
    source = started()
    assert (source.state, source.sequence) == (SourceState.LIVE, None)
    assert live(source, 0) == [0]


def test_live_messages_wait_while_a_replay_runs() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    assert live(source, 2, 3) == []
    # Number 2 is live and in the replay: it is applied once.
    assert replay(source, 0, 1, 2, END) == [0, 1, 2, 3]


def test_skipped_number_starts_a_replay_from_the_gap() -> None:
    source = started(0, 1)
    assert live(source, 4, 5) == []
    assert (source.state, source.gaps, source.resyncs) == (SourceState.SYNCING, 1, 2)
    assert replay(source, 2, 3, 4, END, start=2) == [2, 3, 4, 5]
    assert source.state is SourceState.LIVE


def test_lost_front_of_a_replay_makes_the_source_partial() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    assert replay(source, 7, 8, END) == [7, 8]
    assert (source.state, source.reason) == (SourceState.PARTIAL, "messages 0 to 6 are lost")
    assert live(source, 9) == [9]


def test_lost_front_after_a_gap_forgets_copies() -> None:
    source = started(0, 1)
    live(source, 9)
    assert replay(source, 5, 6, 7, 8, 9, END, start=2) == ["copies", 5, 6, 7, 8, 9]
    assert (source.state, source.reason) == (SourceState.PARTIAL, "messages 2 to 4 are lost")


def test_hole_in_the_middle_of_a_replay_starts_another_attempt() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    assert replay(source, 0, 1, 4, 5, END) == [0, 1]
    assert (source.state, source.replay_wanted_s) == (SourceState.SYNCING, 10.0 + RETRY_S)
    assert replay(source, 2, 3, 4, 5, END, start=2) == [2, 3, 4, 5]
    assert source.state is SourceState.LIVE


def test_duplicate_answers_of_a_replay_are_skipped() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    assert replay(source, 0, 1, 1, 0, 2, END) == [0, 1, 2]


def test_answers_to_an_earlier_attempt_are_ignored() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    old = source.begin_replay(10.0)
    assert source.on_deadline(10.0 + SILENCE_S) == []
    new = source.begin_replay(12.2)
    assert source.on_replayed(12.2, old.attempt, message(0)) == []
    assert source.on_replayed(12.2, old.attempt, END) == []
    assert numbers(source.on_replayed(12.2, new.attempt, message(0))) == [0]


def test_silent_replay_ends_at_its_deadline() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    wanted = source.begin_replay(10.0)
    source.on_replayed(11.0, wanted.attempt, message(0))
    assert source.next_deadline == 11.0 + SILENCE_S
    assert source.on_deadline(12.9) == []
    assert source.attempt == wanted.attempt
    source.on_deadline(13.0)
    assert (source.attempt, source.next_deadline, source.replay_wanted_s) == (None, None, 13.0 + RETRY_S)


def test_attempts_without_progress_end_and_live_messages_go_on() -> None:
    source = started(0, 1)
    live(source, 4, 6)
    for attempt in range(ATTEMPTS_MAX):
        assert source.state is SourceState.SYNCING
        assert replay(source, END) == (["copies", 4, "copies", 6] if attempt == ATTEMPTS_MAX - 1 else [])
    assert (source.state, source.reason) == (SourceState.PARTIAL, "messages 5 to 5 are lost")
    assert live(source, 7) == [7]


def test_gap_during_the_backoff_starts_no_replay() -> None:
    source = started(0)
    live(source, 2)
    for _ in range(ATTEMPTS_MAX):
        replay(source, END)
    assert live(source, 5, now=10.0 + BACKOFF_S - 1) == ["copies", 5]
    assert source.replay_wanted_s is None
    assert live(source, 8, now=10.0 + BACKOFF_S) == []
    assert source.state is SourceState.SYNCING


def test_attempts_with_progress_go_on_until_their_total_time() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    for number in range(2 * ATTEMPTS_MAX):
        # Each attempt has a hole behind its first answer.
        assert replay(source, number, number + 2) == [number]
    wanted = source.begin_replay(10.0 + REPLAY_S)
    source.on_replayed(10.0 + REPLAY_S, wanted.attempt, message(6))
    assert (source.state, source.attempt) == (SourceState.PARTIAL, None)


def test_endless_replay_ends_after_its_total_time() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    wanted = source.begin_replay(0.0)
    applied = [number for number in range(1000) if source.on_replayed(float(number), wanted.attempt, message(number))]
    assert applied == list(range(int(REPLAY_S) + 1))
    assert source.state is SourceState.PARTIAL


def test_live_number_below_the_last_one_is_another_life() -> None:
    source = started(0, 1)
    assert live(source, 2, 3, 0) == [2, 3, "clear"]
    assert source.state is SourceState.SYNCING
    assert replay(source, 0, END, start=0) == [0]
    assert (source.state, source.sequence) == (SourceState.LIVE, 0)


def test_another_life_is_found_by_any_lower_number() -> None:
    source = started(0, 1)
    # The first messages of the new life were lost.
    assert live(source, 2, 3, 4, 3) == [2, 3, 4, "clear"]
    assert replay(source, 0, 1, 2, 3, END, start=0) == [0, 1, 2, 3]


def test_repeated_live_number_is_another_life() -> None:
    source = started()
    assert live(source, 0, 0) == [0, "clear"]


def test_number_between_both_watermarks_is_an_overlap() -> None:
    source = started(0)
    live(source, 1)
    live(source, 3)
    # The replay delivers more than the live socket has delivered until now.
    assert replay(source, 2, 3, 4, 5, END) == [2, 3, 4, 5]
    assert live(source, 4, 5, 6) == [6]


def test_number_zero_after_a_replay_is_another_life() -> None:
    source = started(0, 1, 2)
    assert live(source, 0) == ["clear"]


def test_another_life_during_a_replay_drops_the_queue() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    old = source.begin_replay(10.0)
    assert live(source, 8, 9) == []
    assert live(source, 0) == ["clear"]
    assert source.on_replayed(10.0, old.attempt, message(5)) == []
    assert replay(source, 0, END) == [0]
    assert source.sequence == 0


def test_restart_known_from_elsewhere_clears_and_replays() -> None:
    # The new life is already ahead of the last number, so its numbers look like a gap.
    source = started(0, 1)
    assert numbers(source.on_restart(20.0)) == ["clear"]
    assert live(source, 4, now=20.0) == []
    assert replay(source, 0, 1, 2, 3, 4, END, now=20.2, start=0) == [0, 1, 2, 3, 4]
    assert source.state is SourceState.LIVE


def test_restart_ends_the_partial_state() -> None:
    source = without_replays()
    live(source, 5)
    assert source.state is SourceState.PARTIAL
    source.on_restart(20.0)
    assert source.state is SourceState.CONNECTING
    assert live(source, 0) == [0]
    assert source.state is SourceState.LIVE


def test_source_without_replays_is_live_from_number_zero() -> None:
    source = without_replays()
    assert source.state is SourceState.CONNECTING
    assert live(source, 0, 1) == [0, 1]
    assert source.state is SourceState.LIVE


@pytest.mark.parametrize(
    ("sent", "applied", "gaps"), [((3, 4), [3, 4], 0), ((0, 2), [0, "copies", 2], 1)], ids=["late", "gap"]
)
def test_source_without_replays_is_partial_after_a_skip(
    sent: tuple[int, ...], applied: list[int | str], gaps: int
) -> None:
    source = without_replays()
    assert live(source, *sent) == applied
    assert (source.state, source.gaps, source.replay_wanted_s) == (SourceState.PARTIAL, gaps, None)


def test_failed_source_says_why_and_continues_from_its_position() -> None:
    source = started(0, 1)
    source.on_failed("connection refused")
    assert (source.state, source.reason) == (SourceState.FAILED, "connection refused")
    assert live(source, 2) == []
    source.start(20.0)
    assert replay(source, 2, 3, END, start=2) == [2, 3]
    assert (source.state, source.reason) == (SourceState.LIVE, "")


def test_failure_ends_a_running_replay() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    wanted = source.begin_replay(0.0)
    source.on_failed("connection refused")
    assert (source.attempt, source.next_deadline) == (None, None)
    assert source.on_replayed(1.0, wanted.attempt, message(0)) == []


def test_unreadable_message_clears_and_makes_the_source_partial() -> None:
    source = started(0)
    assert source.on_unreadable("the message has no list of events") == [Clear()]
    assert (source.state, source.reason) == (SourceState.PARTIAL, "the message has no list of events")
    assert live(source, 1) == [1]


@pytest.mark.parametrize(("count", "size"), [(QUEUE_MESSAGES + 5, 1), (20, QUEUE_BYTES // 16)], ids=["number", "bytes"])
def test_queue_of_live_messages_is_bounded(count: int, size: int) -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    for number in range(count):
        source.on_live(1.0, Message(number, bytes(size)))
    kept = min(QUEUE_MESSAGES, QUEUE_BYTES // size)
    assert replay(source, END) == list(range(kept))
    # The lost messages are requested again, although no later message arrives.
    assert replay(source, *range(kept, count), END, start=kept) == list(range(kept, count))
    assert source.state is SourceState.LIVE


def test_first_replay_starts_after_its_jitter() -> None:
    source = EventSource(replays=True, jitter=0.25)
    source.start(8.0)
    assert source.replay_wanted_s == 8.0 + 0.25 * JITTER_S
    assert replays_to_begin(8.1, [source]) == []
    assert replays_to_begin(8.25, [source]) == [source]


def test_only_some_sources_replay_at_once() -> None:
    sources = [EventSource(replays=True) for _ in range(REPLAYS_MAX + 3)]
    for number, source in enumerate(sources):
        source.start(float(len(sources) - number))
    begun = replays_to_begin(100.0, sources)
    assert begun == sources[: -REPLAYS_MAX - 1 : -1]
    for source in begun:
        source.begin_replay(100.0)
    assert replays_to_begin(100.0, sources) == []
    begun[0].on_replayed(100.0, 1, END)
    assert replays_to_begin(100.0, sources) == [sources[2]]


def test_slow_replays_delay_other_sources_for_a_bounded_time() -> None:
    slow = [EventSource(replays=True) for _ in range(REPLAYS_MAX)]
    other = EventSource(replays=True)
    for source in (*slow, other):
        source.start(0.0)
    for source in slow:
        source.begin_replay(1.0)
    for second in range(1, int(PLACE_S) + 1):
        assert replays_to_begin(float(second), [*slow, other]) == []
        for source in slow:
            source.on_replayed(float(second), 1, message(second - 1))
    assert replays_to_begin(1.0 + PLACE_S, [*slow, other]) == [other]
    assert all(source.attempt == 1 for source in slow)


@pytest.mark.parametrize(
    "frames",
    [
        (b"kv@10.0.0.1@m", bytes(7) + b"\x05", b"payload"),
        (b"", bytes(7) + b"\x05", b"payload"),
        (b"", b"topic", bytes(7) + b"\x05", b"payload"),
        (bytes(7) + b"\x05", b"payload"),
    ],
    ids=["live", "replay", "replay with topic", "dealer"],
)
def test_frames_are_read_from_the_back(frames: tuple[bytes, ...]) -> None:
    assert read_frames(frames) == Message(5, b"payload")


@pytest.mark.parametrize(
    ("frames", "read"),
    [
        ((b"", b"\xff" * 8, b""), END),
        ((b"", b"", b"\xff" * 8, b""), END),
        ((b"", b"\xff" * 8, b"payload"), None),
        ((b"", b"\xff" * 7 + b"\xfe", b"payload"), None),
        ((b"", bytes(4), b"payload"), None),
        ((b"payload",), None),
        ((), None),
        ((bytes(8), bytes(MESSAGE_BYTES_MAX + 1)), None),
    ],
    ids=["end", "end with topic", "end with payload", "negative", "short", "one", "none", "large"],
)
def test_other_frames_are_the_end_or_nothing(frames: tuple[bytes, ...], read: ReplayEnd | None) -> None:
    assert read_frames(frames) == read


def test_refused_connection_ends_the_life_of_the_engine() -> None:
    source = started(0, 1, 2)
    source.on_failed("the connection was lost")
    source.connect()
    assert numbers(source.on_refused()) == ["clear"]
    assert (source.sequence, source.on_refused()) == (None, [])
    # The next life is followed from its beginning.
    source.start(20.0)
    assert replay(source, 0, 1, END, now=21.0, start=0) == [0, 1]
    assert source.state is SourceState.LIVE


def test_sleeping_engine_loses_its_blocks_and_waiting_messages() -> None:
    source = started(0, 1)
    assert live(source, 3) == []
    assert numbers(source.on_sleep()) == ["clear"]
    source.on_wake()
    # The replay of message 2, which was requested before, brings nothing new.
    assert replay(source, 2, 3, END, start=4) == []
    assert (source.state, source.reason) == (SourceState.LIVE, "")
    assert live(source, 4, now=11.0) == [4]


def test_replay_never_applies_messages_before_a_sleep() -> None:
    source = started(0, 1, 2)
    source.on_sleep()
    source.on_wake()
    assert live(source, 3) == [3]
    assert numbers(source.on_lost()) == ["clear"]
    source.on_failed("the connection was lost")
    source.start(20.0)
    assert replay(source, 3, END, now=21.0, start=3) == [3]
    assert source.state is SourceState.LIVE


def test_replay_of_a_sleeping_engine_is_not_applied() -> None:
    source = EventSource(replays=True)
    source.on_sleep()
    source.start(0.0)
    assert replay(source, 5, 6, 7, END) == []
    assert (source.state, source.sequence) == (SourceState.LIVE, 7)
    source.on_wake()
    assert live(source, 8, now=11.0) == [8]
    assert numbers(source.on_lost()) == ["clear"]
    source.on_failed("the connection was lost")
    source.start(20.0)
    assert replay(source, 8, END, now=21.0, start=8) == [8]


def test_replay_that_began_before_the_sleep_ends_without_effects() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    wanted = source.begin_replay(0.0)
    assert numbers(source.on_replayed(0.0, wanted.attempt, message(0))) == [0]
    source.on_sleep()
    source.on_wake()
    assert numbers(source.on_replayed(0.0, wanted.attempt, message(1))) == []
    assert numbers(source.on_replayed(0.0, wanted.attempt, END)) == []
    assert (source.state, source.sequence) == (SourceState.LIVE, 1)


def test_engine_that_restarts_after_a_sleep_is_followed_from_its_beginning() -> None:
    source = started(0, 1, 2)
    source.on_sleep()
    # The next report of the new process, which is awake, may come later.
    assert live(source, 0) == ["clear"]
    assert replay(source, 0, 1, END, start=0) == [0, 1]


def test_lost_messages_are_requested_again() -> None:
    source = started(0, 1, 2)
    assert numbers(source.on_lost()) == ["clear"]
    source.on_failed("too many of its messages waited")
    source.start(20.0)
    assert replay(source, 0, 1, 2, END, now=21.0, start=0) == [0, 1, 2]
    assert source.state is SourceState.LIVE


@pytest.mark.parametrize("period", [0.001, 0.05, 1.5])
def test_numbers_without_order_end_in_live_messages(period: float) -> None:
    source = EventSource(replays=True)
    source.on_replay_problem("replay port 5558: connection refused")
    source.start(0.0)
    order, states, applied = Random(7), [], 0
    for step in range(int(20 / period)):
        now = step * period
        source.on_deadline(now)
        if source.replay_wanted_s is not None and source.replay_wanted_s <= now:
            source.begin_replay(now)
        applied += len(
            [each for each in source.on_live(now, message(order.getrandbits(62))) if isinstance(each, Apply)]
        )
        states.append(source.state)
    assert source.resyncs == REPLAYS_IN_SUCCESSION
    first = states.index(SourceState.PARTIAL)
    assert first * period < 10.0
    assert set(states[first:]) == {SourceState.PARTIAL}
    assert applied >= len(states) - first
    assert source.reason.endswith("are lost (replay port 5558: connection refused)")


def test_numbers_without_order_are_replayed_again_after_the_backoff() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    live(source, 5, 4, 3, 2, now=0.0)
    assert source.state is SourceState.PARTIAL
    live(source, 1, now=BACKOFF_S)
    assert (source.state, source.resyncs) == (SourceState.SYNCING, REPLAYS_IN_SUCCESSION + 1)


def test_gaps_that_replays_fill_are_not_in_succession() -> None:
    source = started(0)
    for number in range(1, 40, 2):
        live(source, number + 1, now=10.0 + number)
        assert replay(source, number, END, now=10.0 + number) == [number, number + 1]
        assert source.state is SourceState.LIVE


def test_restarts_after_a_while_are_replayed() -> None:
    source = started(0, 1)
    live(source, 2)
    for number in range(1, 10):
        now = number * BACKOFF_S + 10.0
        assert live(source, 0, now=now) == ["clear"]
        assert replay(source, 0, END, now=now) == [0]
        assert source.state is SourceState.LIVE


def test_answer_ends_the_problem_of_a_replay() -> None:
    source = EventSource(replays=True)
    source.start(0.0)
    source.on_replay_problem("no answer")
    assert replay(source, 3, END) == [3]
    assert source.reason == "messages 0 to 2 are lost"


def test_source_that_waits_says_why() -> None:
    source = without_replays()
    source.on_waiting("no message yet")
    assert (source.state, source.reason) == (SourceState.CONNECTING, "no message yet")
    source.on_failed("the connection was lost")
    source.connect()
    assert (source.state, source.reason) == (SourceState.CONNECTING, "the connection was lost")
    source.start(1.0)
    assert live(source, 0) == [0]
    assert (source.state, source.reason) == (SourceState.LIVE, "")
