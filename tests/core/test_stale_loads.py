"""Tests that the effect of an event does not depend on when a decision last looked at the members."""

import random
from math import inf
from typing import Any

import pytest

from builders import request, text_of
from core.queue_pools import ask, slow_pool
from core.random_traffic import Traffic, pool_of
from dualmap.requests import Decision, SentRequest
from dualmap.router import PoolRouter


class Looking(PoolRouter):
    """A router that looks at the loads of all its members before each event."""

    def look(self, now: float) -> None:
        candidates = self._fleet.candidates
        view = candidates.view(now, request("look", text_of(10, "look")).chain)
        candidates.everyone(view, candidates.ring(None)).requests()

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if not name.startswith("on_"):
            return method

        def look_first(now: float, *arguments: object) -> object:
            self.look(now)
            return method(now, *arguments)

        return look_first


@pytest.mark.parametrize("policy", ["dualmap", "dualmap_paper", "min_ttft", "round_robin"])
@pytest.mark.parametrize("seed", range(4))
def test_router_that_looks_at_all_members_before_each_event_decides_the_same(seed: int, policy: str) -> None:
    chance = random.Random(seed)
    pool = pool_of(chance, policy)
    Traffic(chance, [PoolRouter(pool), Looking(pool)]).run(300)


def test_prefill_that_ended_without_a_report_is_not_ahead_of_a_request_taken_over() -> None:
    """The answer of the first request has no first token. The other request comes long after its expected prefill."""
    router = PoolRouter(slow_pool(dispatch_window_s=inf))
    router.on_request(0.0, request("whole", text_of(2000, "whole"))._replace(streamed=False))
    (endpoint,) = router.status().endpoints
    other = request("other", text_of(2000, "other"), now=100.0)
    router.take_over(
        100.0,
        SentRequest(
            request=other,
            endpoint=endpoint.endpoint,
            sent_s=100.0,
            matched_tokens=0,
            predicted_ttft_s=2.0,
            prefilled=False,
        ),
    )
    decision = ask(router, "new", 1000, now=100.5)
    assert isinstance(decision, Decision)
    assert decision.receipt.predicted_ttft_s == pytest.approx(2.0 - 0.5 + 1.0, rel=0.05)
