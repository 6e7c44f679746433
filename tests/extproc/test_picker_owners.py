"""Tests that the picker finds a request's router by the request ID, and removes the ID when the request ends."""

from dataclasses import replace

import pytest

from dualmap.engines.profile import EngineProfile
from dualmap.router import PoolRouter
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.picked import AnswerLater
from extproc.desks import Desk
from extproc.envoy_messages import chat, crowded_pool, pool

EVENTS = {
    "on_first_token": lambda picker, each: picker.first_token(12.0, each),
    "on_heard": lambda picker, each: picker.heard(12.0, each),
    "on_served": lambda picker, each: picker.served(12.0, each, "10.9.9.9:1"),
    "on_finished": lambda picker, each: picker.finished(12.0, each, None),
    "on_aborted": lambda picker, each: picker.aborted(12.0, each),
    "on_failed": lambda picker, each: picker.failed(12.0, each),
}


@pytest.mark.parametrize("name", EVENTS)
def test_picker_event_reaches_only_the_router_of_its_request(name, monkeypatch):
    desk = Desk(pool(), pool("second", model="s"), pool("third", model="t"))
    picked = desk.pick(chat(model="s"))
    asked: list[str] = []
    real = getattr(PoolRouter, name)

    def spy(self, *arguments):
        asked.append(self.pool.id)
        return real(self, *arguments)

    monkeypatch.setattr(PoolRouter, name, spy)
    EVENTS[name](desk.picker, "another replica's-1")
    EVENTS[name](desk.picker, picked.request_id)

    assert asked == ["llm/second"]


@pytest.mark.parametrize("name", ["finished", "rejected", "aborted", "failed"])
def test_picker_removes_a_request_that_ended(name):
    desk = Desk()
    picked = desk.pick()
    getattr(desk.picker, name)(12.0, picked.request_id, *([None] if name == "finished" else []))
    assert not desk.picker._owners


def test_picker_removes_a_request_that_expired():
    desk = Desk()
    desk.pick()
    deadline_s = desk.picker.next_deadline()
    assert deadline_s is not None
    desk.picker.on_deadline(deadline_s)
    assert desk.observer.names() == ["routed", "expired"]
    assert not desk.picker._owners


def test_picker_removes_rejected_and_aborted_requests():
    desk = Desk(pool("empty", model="e", members=0), crowded_pool())
    desk.refused(chat(model="e"))
    first = desk.pick(chat("long " * 10_000))
    waiting = desk.ask()
    assert isinstance(waiting, AnswerLater)
    desk.picker.aborted(12.0, waiting.request_id)
    assert set(desk.picker._owners) == {first.request_id}


def test_picker_removes_the_requests_of_a_removed_pool():
    desk = Desk(pool(), pool("other", model="o"))
    gone, stays = desk.pick(chat(model="o")), desk.pick()
    desk.picker.set_pools(12.0, (pool(),))
    desk.picker.set_pools(13.0, (pool(), pool("other", model="o")))
    for picked in (gone, stays):
        desk.picker.access_log(14.0, AccessLogEntry(request_id=picked.request_id, status=200))
    assert desk.observer.names() == ["routed", "routed", "finished"]
    assert not desk.picker._owners


def test_picker_reserved_adapter_is_not_served_and_changes_no_pool(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(PoolRouter, "on_pool", lambda self, *_: asked.append(self.pool.id))
    desk = Desk(pool())
    desk.picker.on_profile(1.0, "llm/qwen", "qwen-0", EngineProfile(models=("m", "sql"), adapters=("sql",)))
    assert desk.pick(chat(model="sql")).decision is not None

    desk.picker.set_pools(2.0, [replace(pool(), foreign_names=frozenset({"sql", "other"}))])
    assert desk.refused(chat(model="sql")) == 404
    desk.picker.set_pools(3.0, [replace(pool(), foreign_names=frozenset({"other"}))])
    assert desk.pick(chat(model="sql")).decision is not None
    assert asked == []
