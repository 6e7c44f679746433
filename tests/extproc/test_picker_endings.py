"""Tests of a request's end at the picker: each request ends once, and the picker measures its usage once."""

import pytest

from dualmap.requests import Usage
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.settings import Limits
from extproc.desks import Desk
from extproc.envoy_messages import chat, pool


def test_picker_reports_the_first_token_once():
    desk = Desk()
    picked = desk.pick()

    desk.picker.first_token(12.0, picked.request_id)
    desk.picker.first_token(13.0, picked.request_id)

    assert desk.observer.names() == ["routed", "first_token"]


@pytest.mark.parametrize("end", ["finished", "rejected", "aborted", "failed"])
def test_picker_ends_a_request_only_once(end):
    desk = Desk()
    picked = desk.pick()
    getattr(desk.picker, end)(12.0, picked.request_id, *([None] if end == "finished" else []))

    desk.picker.finished(13.0, picked.request_id, None)
    desk.picker.aborted(13.0, picked.request_id)

    assert desk.observer.names() == ["routed", end]
    assert desk.in_flight == 0


def entry(picked: Picked, **fields) -> AccessLogEntry:
    return AccessLogEntry(request_id=picked.request_id, **({"status": 200} | fields))


def test_picker_ends_request_with_usage_from_the_access_log():
    desk = Desk()
    picked = desk.pick()

    desk.picker.access_log(12.0, entry(picked, usage=Usage(cached_tokens=7)))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert desk.observer.events[-1].completion.measured_cached_tokens == 7
    assert desk.in_flight == 0


def test_picker_counts_usage_after_the_request_end_once():
    desk = Desk()
    picked = desk.pick()
    desk.picker.finished(12.0, picked.request_id, None)

    desk.picker.access_log(12.1, entry(picked, usage=Usage(cached_tokens=7)))
    desk.picker.access_log(12.2, entry(picked, usage=Usage(cached_tokens=7)))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert (desk.observer.events[-1].pool, desk.observer.events[-1].now) == ("llm/qwen", 12.1)
    assert desk.observer.events[-1].completion.measured_cached_tokens == 7


def test_picker_stores_a_bounded_number_of_ended_requests():
    desk = Desk(limits=Limits(ended_requests=2))
    picks = [desk.pick() for _ in range(3)]
    for picked in picks:
        desk.picker.finished(12.0, picked.request_id, None)

    for picked in picks:
        desk.picker.access_log(13.0, entry(picked, usage=Usage(cached_tokens=1)))

    assert desk.observer.names().count("measured") == 2


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"status": 429}, "aborted"),
        ({"status": None}, "aborted"),
        ({"flags": ("downstream_connection_termination",)}, "aborted"),
        ({"flags": ("downstream_connection_termination", "upstream_remote_reset")}, "aborted"),
        ({"status": 503, "flags": ("upstream_overflow",)}, "aborted"),
        ({"status": 500}, "failed"),
        ({"status": 503, "flags": ("upstream_connection_failure",)}, "failed"),
        ({"status": 200, "flags": ("upstream_connection_termination",)}, "failed"),
    ],
)
def test_picker_reads_the_aborting_side_from_the_access_log(fields, end):
    desk = Desk()
    picked = desk.pick()

    desk.picker.access_log(12.0, entry(picked, **fields))

    assert desk.observer.names() == ["routed", end]
    assert desk.in_flight == 0


@pytest.mark.parametrize("status", [400, 404, 422])
def test_picker_engine_rejection_is_no_abort_and_drops_the_prefix(status):
    desk = Desk()
    text = "a long shared prefix " * 200
    picked = desk.pick(chat(text))

    desk.picker.access_log(12.0, entry(picked, status=status))

    assert desk.observer.names() == ["routed", "rejected"]
    assert desk.in_flight == 0
    assert "matched=0" in (desk.pick(chat(text)).receipt or "")


def test_picker_counts_usage_despite_early_client_close():
    desk = Desk()
    picked = desk.pick()
    desk.picker.finished(12.0, picked.request_id, None)

    gone = {"flags": ("downstream_connection_termination",)}
    desk.picker.access_log(12.1, entry(picked, usage=Usage(cached_tokens=7), **gone))

    assert desk.observer.names() == ["routed", "finished", "measured"]
    assert desk.observer.events[-1].completion.measured_cached_tokens == 7


def test_picker_moves_request_to_the_server_in_the_access_log():
    desk = Desk()
    picked = desk.pick()
    other = picked.destination.split(",")[1]

    desk.picker.access_log(12.0, entry(picked, served_endpoint=other))

    assert desk.observer.names() == ["routed", "served_elsewhere", "finished"]


def test_picker_ignores_access_log_entries_of_other_routers():
    desk = Desk()
    desk.pick()

    desk.picker.access_log(12.0, AccessLogEntry(request_id="another-0", status=200, served_endpoint="1.2.3.4:5"))

    assert desk.observer.names() == ["routed"]
    assert desk.in_flight == 1


def test_picker_expires_requests_without_events():
    desk = Desk(pool("a", model="a"), pool("b", model="b"))
    assert desk.picker.next_deadline() is None
    desk.pick(chat(model="b"), now=20.0)
    desk.pick(chat(model="a"), now=30.0)

    first = desk.picker.next_deadline()
    assert first is not None
    desk.picker.on_deadline(first)
    assert (desk.observer.names().count("expired"), desk.in_flight) == (1, 1)
    second = desk.picker.next_deadline()
    assert second == pytest.approx(first + 10.0)
    desk.picker.on_deadline(second)

    assert desk.in_flight == 0
    assert desk.picker.next_deadline() is None
