"""Helpers for the tests of a pool's router: send requests and sum the load."""

from builders import request
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
