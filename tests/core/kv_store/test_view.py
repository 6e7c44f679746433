from dualmap.kv_store.availability import FAILURES_MAX, LEFT_ALONE_S, Availability
from dualmap.kv_store.view import FRESH_S, HOLDERS_MAX, KEYS_MAX, NO_MATCH, STALE_S, Chunk, StoreMatch, StoreView

KEYS = ("a", "b", "c", "d")


def held(*holders: str) -> Chunk:
    return Chunk(is_held=True, holders=frozenset(holders))


def test_match_ends_at_the_first_missing_chunk() -> None:
    view = StoreView()
    view.put(0.0, KEYS, {"a": held(), "b": held(), "d": held()})

    assert view.match(0.1, KEYS, 256) == StoreMatch(512)


def test_match_without_the_first_chunk_is_none() -> None:
    view = StoreView()
    view.put(0.0, KEYS, {"b": held("10.0.0.1"), "c": held("10.0.0.1")})

    assert view.match(0.1, KEYS, 256) == NO_MATCH


def test_holder_counts_without_gaps_from_the_first_chunk() -> None:
    view = StoreView()
    view.put(0.0, KEYS, {"a": held("h1", "h2"), "b": held("h1"), "c": held("h1", "h2", "h3"), "d": held("h2")})

    assert view.match(0.1, KEYS, 100) == StoreMatch(400, (("h1", 300), ("h2", 100)))


def test_new_answer_is_not_asked_again_and_an_old_one_is() -> None:
    view = StoreView()
    view.put(0.0, KEYS[:2], {"a": held(), "b": held()})

    assert view.unknown(0.5 * FRESH_S, KEYS) == ("c", "d")
    assert view.unknown(FRESH_S, KEYS) == KEYS


def test_chunks_behind_a_missing_one_are_not_asked() -> None:
    view = StoreView()
    view.put(0.0, ("a", "b"), {"a": held()})

    assert view.unknown(0.1, KEYS) == ()


def test_old_answer_counts_until_it_is_stale() -> None:
    view = StoreView()
    view.put(0.0, KEYS, {"a": held()})

    assert view.match(0.9 * STALE_S, KEYS, 256).tokens == 256
    assert view.match(STALE_S, KEYS, 256) == NO_MATCH


def test_old_answers_are_enough_if_the_store_held_the_chunks() -> None:
    view = StoreView()
    view.put(0.0, KEYS[:3], {"a": held(), "b": held()})

    assert view.is_known(0.9 * FRESH_S, KEYS)
    assert not view.is_known(FRESH_S, KEYS), "the store may hold a chunk by now that it lacked before"
    assert view.is_known(0.9 * STALE_S, KEYS[:2])
    assert not view.is_known(STALE_S, KEYS[:2])
    assert not view.is_known(0.0, (*KEYS[:2], "d"))


def test_view_keeps_a_bounded_number_of_answers() -> None:
    view = StoreView()
    view.put(0.0, ("first",), {"first": held()})
    view.put(0.0, [str(each) for each in range(KEYS_MAX)], {})

    assert len(view) == KEYS_MAX
    assert view.unknown(0.0, ("first",)) == ("first",)


def test_chunk_keeps_a_bounded_number_of_holders() -> None:
    view = StoreView()
    view.put(0.0, ("a",), {"a": held(*(f"h{each:04}" for each in range(HOLDERS_MAX + 1)))})

    assert len(view.match(0.0, ("a",), 1).held_at) == HOLDERS_MAX


def test_store_is_left_alone_after_failures_in_a_row() -> None:
    store = Availability()

    changes = [store.failed(float(each), "late") for each in range(FAILURES_MAX)]

    assert changes == [False] * (FAILURES_MAX - 1) + [True]
    assert not store.may_ask(FAILURES_MAX - 1 + 0.9 * LEFT_ALONE_S)
    assert store.reason == "late"


def test_answer_ends_the_row_of_failures() -> None:
    store = Availability()
    for _ in range(FAILURES_MAX - 1):
        store.failed(0.0, "late")

    assert not store.answered()
    assert not store.failed(0.0, "late")
    assert store.may_ask(0.0)


def test_store_that_was_left_alone_gets_one_question() -> None:
    store = Availability()
    for _ in range(FAILURES_MAX):
        store.failed(0.0, "late")

    assert [store.may_ask(LEFT_ALONE_S) for _ in range(2)] == [True, False]
    assert store.answered()
    assert store.may_ask(LEFT_ALONE_S)


def test_failed_trial_leaves_the_store_alone_again() -> None:
    store = Availability()
    for _ in range(FAILURES_MAX):
        store.failed(0.0, "late")
    assert store.may_ask(LEFT_ALONE_S)

    assert not store.failed(LEFT_ALONE_S + 1.0, "refused")
    assert not store.may_ask(2 * LEFT_ALONE_S)
    assert store.may_ask(2 * LEFT_ALONE_S + 1.0)
    assert store.reason == "refused"
