"""Tests of the longest wait of a request that several routers queue."""

import pytest

from core.queue_pools import slow_pool
from core.shared_routers import Routers, at
from dualmap.requests import Queued, Reason, Rejection


def test_request_is_rejected_after_the_longest_wait_if_the_owner_is_silent() -> None:
    both = Routers(slow_pool(max_wait_s=5.0))
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    both.wait(4.9)
    assert both.outcomes["second"] == [Queued(request_id="second")]
    both.now = 5.0
    both.take(both[other].on_deadline(5.0))
    rejection = Rejection(request_id="second", reason=Reason.WAITED_TOO_LONG, retry_after_s=5.0)
    assert both.outcomes["second"][1:] == [rejection]
    assert both.results == ["answered", "answered"]
    both.deliver()
    assert both[both.owner].status().held == both[other].status().held == 0


@pytest.mark.parametrize("moves_to", ["other", "self"])
def test_longest_wait_counts_from_the_first_router_that_queued_the_request(moves_to: str) -> None:
    all3 = Routers(slow_pool(max_wait_s=5.0), count=3)
    asking, third = all3.others
    for each in ("first", "second"):
        all3.ask(asking, at(each))
        all3.deliver()
    all3.wait(4.0)
    all3.ask(asking, at("third", now=all3.now))
    all3.meet({third if moves_to == "other" else asking})
    all3.deliver()
    for each in ("second", "third"):
        assert all3.outcomes[each] == [Queued(request_id=each)]
    all3.wait(1.001)
    assert [type(each) for each in all3.outcomes["second"]] == [Queued, Rejection]
    assert len(all3.outcomes["third"]) == 1
    all3.deliver()
    assert sum(all3[each].status().held for each in all3.names) == 1
