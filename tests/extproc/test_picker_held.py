"""Queued requests at the picker: the events that release them, their order, and the answers at their limits."""

import pytest

from dualmap_extproc.errors import Refused
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Abandoned
from dualmap_extproc.request.picked import Picked, Waiting
from extproc.desks import Desk
from extproc.envoy_messages import chat, crowded_pool, pool

SHORT = chat()
# Two minutes of prefill for the engine of a crowded pool.
LONG = chat("long " * 10_000)


class Queue(Desk):
    """A desk whose only engine is busy; new requests wait."""

    def __init__(self, *pools, **queue) -> None:
        super().__init__(*(pools or (crowded_pool(**queue),)))
        self.first = self.pick(LONG)

    def hold(self, body: bytes = SHORT, *, now=10.0, resume=None) -> str:
        outcome = self.picker.pick(now, body, None, now, headers={}, resume=resume or self.resumed.append)
        assert isinstance(outcome, Waiting)
        return outcome.request_id

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())

    def ids_resumed(self) -> list[str]:
        assert all(isinstance(each, Picked) for each in self.resumed)
        return [each.request_id for each in self.resumed]


@pytest.mark.parametrize(
    "event",
    [
        lambda picker, first: picker.first_token(12.0, first),
        lambda picker, first: picker.finished(12.0, first, None),
        lambda picker, first: picker.rejected(12.0, first),
        lambda picker, first: picker.aborted(12.0, first),
        lambda picker, first: picker.failed(12.0, first),
        lambda picker, first: picker.access_log(12.0, AccessLogEntry(request_id=first, status=200)),
        lambda picker, _: picker.on_deadline(10.0 + 600.0),
        lambda picker, _: picker.hold_no_more(12.0),
        lambda picker, _: picker.set_pools(12.0, (crowded_pool(dispatch_window_s=1000.0),)),
    ],
    ids=["first_token", "finished", "rejected", "aborted", "failed", "access_log", "deadline", "hold_no_more", "pools"],
)
def test_whatever_makes_room_resumes_who_waits_once(event):
    desk = Queue(max_wait_s=10_000.0)
    waiting = desk.hold()
    assert desk.resumed == []

    event(desk.picker, desk.first.request_id)
    event(desk.picker, desk.first.request_id)

    assert desk.ids_resumed() == [waiting]
    assert desk.held == 0
    assert desk.observer.names().count("routed") == 2
    assert desk.observer.names().count("waited") == 1


def test_a_request_that_makes_another_move_does_not_lose_it():
    """Capacity freed by time alone is first seen at the next call."""
    desk = Queue(dispatch_window_s=1.0)
    waiting = desk.hold()

    later = desk.pick(now=10_000.0)

    assert desk.ids_resumed() == [waiting]
    assert later.request_id != waiting


def test_held_requests_are_resumed_in_the_order_they_came():
    desk = Queue(dispatch_window_s=1.0)
    waiting = [desk.hold() for _ in range(5)]

    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.ids_resumed() == waiting


def test_who_is_resumed_may_come_back_to_the_picker_at_once():
    """The next request is cancelled during the release of the one before, so it is never released."""
    desk = Queue(dispatch_window_s=1.0)
    asked_again = []
    others: list[str] = []

    def resume(picked) -> None:
        desk.picker.aborted(12.0, others[0])
        desk.picker.finished(12.0, picked.request_id, None)
        asked_again.append(desk.pick(now=12.0))

    desk.hold(resume=resume)
    others += [desk.hold(), desk.hold()]

    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.ids_resumed() == others[1:]
    assert len(asked_again) == 1
    names = desk.observer.names()
    assert (names.count("routed"), names.count("aborted"), names.count("finished")) == (5, 1, 1)
    assert names.count("waited") == 3
    assert desk.in_flight == 3


def test_a_request_queued_and_released_during_its_pick_is_answered_by_it():
    """Its arrival releases another request, whose stream ends as it is resumed and so makes room for this one."""
    desk = Queue(dispatch_window_s=1.0)
    ended: list[str] = []

    def resume(picked):
        ended.append(picked.request_id)
        desk.picker.aborted(10_000.0, picked.request_id)

    waiting = desk.hold(LONG, resume=resume)

    later = desk.ask(LONG, now=10_000.0)

    assert isinstance(later, Picked)
    assert ended == [waiting]
    assert desk.resumed == []
    assert desk.held == 0


def test_a_request_that_is_queued_while_its_arrival_releases_another_waits():
    desk = Queue(dispatch_window_s=1.0)
    waiting = desk.hold(LONG)

    later = desk.ask(LONG, now=10_000.0)

    assert isinstance(later, Waiting)
    assert desk.ids_resumed() == [waiting]
    assert desk.held == 1


def test_who_gives_up_is_never_resumed():
    desk = Queue()
    waiting = desk.hold()

    desk.picker.aborted(11.0, waiting)
    desk.picker.aborted(11.0, waiting)
    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.resumed == []
    assert desk.observer.names() == ["routed", "waited", "first_token"]
    assert [(each.pool, each.queued_s) for each in desk.observer.of(Abandoned)] == [("llm/qwen", 1.0)]


def test_who_waits_in_a_pool_that_goes_is_refused():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    desk.hold()

    desk.picker.set_pools(12.0, (pool("other", model="o"),))

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.pool) == (503, "no_endpoint", "llm/qwen")
    assert desk.observer.names() == ["routed", "refused", "waited"]
    assert desk.picker.next_deadline() is None


def test_who_waits_too_long_is_told_when_to_come_back_in_whole_seconds():
    desk = Queue(max_wait_s=30.0)
    desk.hold(now=10.0)

    desk.picker.on_deadline(39.0)
    assert desk.resumed == []
    desk.picker.on_deadline(40.0)

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (429, "waited_too_long")
    assert isinstance(refused.retry_after_s, int)
    assert refused.retry_after_s >= 1


def test_the_first_member_takes_who_waited_for_it():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    outcome = desk.ask()
    assert isinstance(outcome, Waiting)

    desk.picker.set_pools(12.0, (crowded_pool(members=2, hold_when_empty=True),))

    (picked,) = desk.resumed
    assert isinstance(picked, Picked)
    assert picked.request_id == outcome.request_id


def test_once_nothing_is_held_nothing_is_again():
    desk = Queue(crowded_pool(hold_when_empty=True), crowded_pool("empty", members=0, hold_when_empty=True))
    desk.picker.hold_no_more(11.0)

    assert isinstance(desk.ask(), Picked)
    desk.picker.set_pools(12.0, (crowded_pool(members=0, hold_when_empty=True),))
    refused = desk.ask()
    assert isinstance(refused, Refused)
    assert refused.status == 503
    desk.picker.set_pools(13.0, (crowded_pool(members=1),))
    assert isinstance(desk.ask(), Picked)


def test_who_waits_for_a_first_member_is_told_when_the_router_ends():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    assert isinstance(desk.ask(), Waiting)

    desk.picker.hold_no_more(11.0)

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert refused.status == 503


def test_the_first_request_that_is_held_is_announced_with_its_deadline():
    desk = Queue(max_wait_s=50.0)
    announced: list[float | None] = []
    desk.picker.on_first_held(lambda: announced.append(desk.picker.next_deadline()))
    assert not desk.picker.holding
    assert desk.picker.next_deadline() == pytest.approx(10.0 + 600.0)

    waiting = [desk.hold(now=11.0), desk.hold(now=12.0)]
    assert desk.picker.holding
    for request_id in waiting:
        desk.picker.aborted(13.0, request_id)
    assert not desk.picker.holding
    desk.hold(now=14.0)

    assert announced == [pytest.approx(61.0), pytest.approx(64.0)]


@pytest.mark.parametrize("status", [None, 200, 400, 503])
def test_an_entry_that_names_a_held_request_is_none_of_envoys(status):
    desk = Queue()
    waiting = desk.hold()

    desk.picker.access_log(12.0, AccessLogEntry(request_id=waiting, status=status))

    assert desk.held == 1
    desk.picker.first_token(12.0, desk.first.request_id)
    assert desk.ids_resumed() == [waiting]


def test_news_goes_to_its_pool_and_may_make_room():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    teller = Desk(crowded_pool(), pool("other", model="o"))
    waiting = desk.hold()
    told = dict(teller.picker.take_update(11.0))
    assert told.keys() == {"llm/qwen", "llm/other"}

    # Two minutes later the current prefill should have ended, which is seen at the next event.
    desk.picker.on_update(10_000.0, "llm/qwen", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_update(10_000.0, "llm/gone", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_bindings(10_000.0, "llm/other", ())
    desk.picker.on_bindings(10_000.0, "llm/gone", ())

    assert desk.ids_resumed() == [waiting]
    assert [status.peers for status in desk.picker.statuses()] == [1, 0]
