"""Tests of queued requests at the picker: the events that release requests, the order, and rejections."""

import pytest

from dualmap.requests import Reason, Rejection
from dualmap.router import PoolRouter
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Abandoned
from dualmap_extproc.request.picked import AnswerLater, Picked
from extproc.desks import Desk
from extproc.envoy_messages import chat, crowded_pool, pool

SHORT = chat()
# A prompt with two minutes of prefill on the slow engine.
LONG = chat("long " * 10_000)


class Queue(Desk):
    """A desk with a single busy engine, so that new requests queue."""

    def __init__(self, *pools, **queue) -> None:
        super().__init__(*(pools or (crowded_pool(**queue),)))
        self.first = self.pick(LONG)

    def hold(self, body: bytes = SHORT, *, now=10.0, resume=None) -> str:
        outcome = self.picker.pick(now, body, None, now, headers={}, resume=resume or self.resumed.append)
        assert isinstance(outcome, AnswerLater)
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
        lambda picker, _: picker.stop_queueing(12.0),
        lambda picker, _: picker.set_pools(12.0, (crowded_pool(dispatch_window_s=1000.0),)),
    ],
    ids=[
        "first_token",
        "finished",
        "rejected",
        "aborted",
        "failed",
        "access_log",
        "deadline",
        "stop_queueing",
        "pools",
    ],
)
def test_picker_resumes_request_once_after_any_event_that_frees_room(event):
    desk = Queue(max_wait_s=10_000.0)
    waiting = desk.hold()
    assert desk.resumed == []

    event(desk.picker, desk.first.request_id)
    event(desk.picker, desk.first.request_id)

    assert desk.ids_resumed() == [waiting]
    assert desk.held == 0
    assert desk.observer.names().count("routed") == 2
    assert desk.observer.names().count("waited") == 1


def test_picker_resumes_queued_request_during_a_later_pick():
    """If a dispatch window opens with time, the next pick dispatches the queued request."""
    desk = Queue(dispatch_window_s=1.0)
    waiting = desk.hold()

    later = desk.pick(now=10_000.0)

    assert desk.ids_resumed() == [waiting]
    assert later.request_id != waiting


def test_picker_resumes_queued_requests_in_order():
    desk = Queue(dispatch_window_s=1.0)
    waiting = [desk.hold() for _ in range(5)]

    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.ids_resumed() == waiting


def test_picker_can_be_called_by_a_resumed_request():
    """The release of a queued request aborts the next queued request, which must then not be released."""
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


def test_picker_answers_a_request_released_during_its_pick():
    """The new request's arrival releases another request. The other request's stream ends at its release, so the new
    request gets the member.
    """
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


def test_picker_queued_request_waits_after_releasing_another():
    desk = Queue(dispatch_window_s=1.0)
    waiting = desk.hold(LONG)

    later = desk.ask(LONG, now=10_000.0)

    assert isinstance(later, AnswerLater)
    assert desk.ids_resumed() == [waiting]
    assert desk.held == 1


def test_picker_never_resumes_an_aborted_queued_request():
    desk = Queue()
    waiting = desk.hold()

    desk.picker.aborted(11.0, waiting)
    desk.picker.aborted(11.0, waiting)
    desk.picker.first_token(12.0, desk.first.request_id)

    assert desk.resumed == []
    assert desk.observer.names() == ["routed", "waited", "first_token"]
    assert [(each.pool, each.queued_s) for each in desk.observer.of(Abandoned)] == [("llm/qwen", 1.0)]


def test_picker_rejects_queued_requests_of_a_removed_pool():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    desk.hold()

    desk.picker.set_pools(12.0, (pool("other", model="o"),))

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.pool) == (503, "no_endpoint", "llm/qwen")
    assert desk.observer.names() == ["routed", "refused", "waited"]
    assert desk.picker.next_deadline() is None


def test_picker_rejects_request_queued_too_long_with_retry_after():
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


def test_picker_dispatches_queued_requests_to_the_first_member():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    outcome = desk.ask()
    assert isinstance(outcome, AnswerLater)

    desk.picker.set_pools(12.0, (crowded_pool(members=2, hold_when_empty=True),))

    (picked,) = desk.resumed
    assert isinstance(picked, Picked)
    assert picked.request_id == outcome.request_id


def test_picker_queues_no_request_after_queueing_is_stopped():
    desk = Queue(crowded_pool(hold_when_empty=True), crowded_pool("empty", members=0, hold_when_empty=True))
    desk.picker.stop_queueing(11.0)

    assert isinstance(desk.ask(), Picked)
    desk.picker.set_pools(12.0, (crowded_pool(members=0, hold_when_empty=True),))
    refused = desk.ask()
    assert isinstance(refused, Refused)
    assert refused.status == 503
    desk.picker.set_pools(13.0, (crowded_pool(members=1),))
    assert isinstance(desk.ask(), Picked)


def test_picker_rejects_requests_of_empty_pool_at_shutdown():
    desk = Desk(crowded_pool(members=0, hold_when_empty=True))
    assert isinstance(desk.ask(), AnswerLater)

    desk.picker.stop_queueing(11.0)

    (refused,) = desk.resumed
    assert isinstance(refused, Refused)
    assert refused.status == 503


def test_picker_reports_deadline_of_the_first_queued_request():
    desk = Queue(max_wait_s=50.0)
    announced: list[float | None] = []
    desk.picker.on_first_waiting(lambda: announced.append(desk.picker.next_deadline()))
    assert not desk.picker.has_waiting
    assert desk.picker.next_deadline() == pytest.approx(10.0 + 600.0)

    waiting = [desk.hold(now=11.0), desk.hold(now=12.0)]
    assert desk.picker.has_waiting
    for request_id in waiting:
        desk.picker.aborted(13.0, request_id)
    assert not desk.picker.has_waiting
    desk.hold(now=14.0)

    assert announced == [pytest.approx(61.0), pytest.approx(64.0)]


@pytest.mark.parametrize("status", [None, 200, 400, 503])
def test_picker_ignores_access_log_entry_of_a_queued_request(status):
    desk = Queue()
    waiting = desk.hold()

    desk.picker.access_log(12.0, AccessLogEntry(request_id=waiting, status=status))

    assert desk.held == 1
    desk.picker.first_token(12.0, desk.first.request_id)
    assert desk.ids_resumed() == [waiting]


def test_picker_replication_update_can_release_queued_requests():
    desk = Queue(crowded_pool(), pool("other", model="o"))
    teller = Desk(crowded_pool(), pool("other", model="o"))
    waiting = desk.hold()
    told = dict(teller.picker.take_update(11.0))
    assert told.keys() == {"llm/qwen", "llm/other"}

    # The estimated end of the pending prefill is two minutes later; the next update has no pending prefill.
    desk.picker.on_update(10_000.0, "llm/qwen", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_update(10_000.0, "llm/gone", "teller", told["llm/qwen"], 0.0)
    desk.picker.on_bindings(10_000.0, "llm/other", ())
    desk.picker.on_bindings(10_000.0, "llm/gone", ())

    assert desk.ids_resumed() == [waiting]
    assert [status.peers for status in desk.picker.statuses()] == [1, 0]


def test_picker_ignores_outcomes_of_unknown_requests(monkeypatch, caplog):
    desk = Desk()
    completion = desk.picker._served.only.on_finished(10.0, desk.pick().request_id, None)[0]
    stray = (completion._replace(request_id="r1-8-0"),), (Rejection(request_id="r1-9-0", reason=Reason.QUEUE_FULL),)
    monkeypatch.setattr(PoolRouter, "on_deadline", lambda *_: stray)
    desk.picker.on_deadline(11.0)
    assert desk.observer.names() == ["routed", "expired"]
    assert "Ignoring the outcome of an unknown request" in caplog.messages
