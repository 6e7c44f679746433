"""Tests of the fan-out of observations: subscribers receive the types that they request, and a faulty subscriber does
not affect others.
"""

import logging

from dualmap_extproc.request.observations import Enqueued, FanOut, Observation, RoutedBodiless
from extproc.desks import Desk
from extproc.envoy_messages import chat, pool

QUEUED = Enqueued(now=1.0, pool="llm/qwen")
BODILESS = RoutedBodiless(now=2.0, pool="llm/qwen")


def test_fan_out_sends_observation_to_every_subscriber_of_its_type():
    fan_out = FanOut()
    first: list[Observation] = []
    second: list[Observation] = []
    fan_out.subscribe(Enqueued, first.append)
    fan_out.subscribe(Enqueued, second.append)
    fan_out.subscribe(RoutedBodiless, second.append)

    fan_out.report(QUEUED)
    fan_out.report(BODILESS)

    assert (first, second) == ([QUEUED], [QUEUED, BODILESS])


def test_fan_out_logs_failing_handler_once_and_calls_all_others(caplog):
    def broken(_: Observation) -> None:
        raise ValueError("a secret")

    fan_out = FanOut()
    got: list[Observation] = []
    fan_out.subscribe(Enqueued, broken)
    fan_out.subscribe(Enqueued, got.append)

    with caplog.at_level(logging.ERROR, logger="dualmap_extproc"):
        fan_out.report(QUEUED)
        fan_out.report(QUEUED)

    assert got == [QUEUED, QUEUED]
    (record,) = caplog.records
    assert record.message == "Observation handler failed, further failures are not logged"
    assert record.details["error"] == "ValueError"
    assert record.details["handler"].endswith("broken")
    assert "test_observations.py" in record.details["place"]
    assert "secret" not in str(record.details)


def test_every_observation_has_the_time_and_pool_of_its_event():
    desk = Desk(pool(), pool("other", model="o"))
    picked = desk.pick(chat(model="o"), now=10.0)
    desk.picker.first_token(11.0, picked.request_id)
    desk.picker.finished(12.0, picked.request_id, None)
    desk.picker.pick_bodiless(13.0, None)
    desk.ask(b"{}", now=14.0)
    told = [(each.now, each.pool) for each in desk.observer.events]
    assert told == [(10.0, "llm/other"), (11.0, "llm/other"), (12.0, "llm/other"), (13.0, "llm/qwen"), (14.0, "")]
