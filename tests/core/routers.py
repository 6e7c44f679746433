"""Helpers for the tests of a pool's router: send requests and sum the load."""

from builders import request
from dualmap.engines.profile import EngineProfile
from dualmap.requests import Decision
from dualmap.router import PoolRouter


def decide(router: PoolRouter, id: str, text: str, now: float = 0.0) -> Decision:
    decision = router.on_request(now, request(id, text, now=now)).answer
    assert isinstance(decision, Decision)
    return decision


def loads(router: PoolRouter) -> tuple[int, int, int]:
    endpoints = router.status().endpoints
    return (
        sum(each.in_flight for each in endpoints),
        sum(each.pending_prefill_tokens for each in endpoints),
        sum(each.active_kv_tokens for each in endpoints),
    )


def dispatched_s(router: PoolRouter, profile: EngineProfile) -> float:
    """Report the profile of m-0 twice a second from 1.5 s on; return the time of the first dispatch, within 30 s."""
    now = 1.0
    while now < 30.0:
        now += 0.5
        outcomes = router.on_profile(now, "m-0", profile).outcomes + router.on_deadline(now).outcomes
        if any(isinstance(each, Decision) for each in outcomes):
            return now
    raise AssertionError("no request was dispatched within 30 s")
