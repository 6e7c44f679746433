"""Pools of slow members with short dispatch windows, and helpers for the tests of queued requests."""

from dataclasses import replace
from typing import Any

from builders import pool, request, text_of
from dualmap.pools.pool import Engine, Pool, Queue, Rebalance, Routing, Slo
from dualmap.requests import Decision, Effects, Queued, Rejection
from dualmap.router import PoolRouter

SPEED = 1000.0


def slow_pool(
    count: int = 1,
    *,
    policy: str = "dualmap",
    slo_ttft_s: float = 600.0,
    rebalance: bool = True,
    **queue: Any,
) -> Pool:
    """Return members with a prefill speed of 1000 tokens per second and a dispatch window of one second."""
    routing = Routing(
        policy=policy,
        queue=replace(Queue(dispatch_window_s=1.0), **queue),
        rebalance=Rebalance(enabled=rebalance),
    )
    engine = Engine(prefill_tokens_per_second=SPEED)
    return replace(pool(count, routing=routing, engine=engine), slo=Slo(ttft_s=slo_ttft_s))


def ask_all(
    router: PoolRouter, id: str, tokens: int = 2000, *, now: float = 0.0
) -> Effects[Decision | Queued | Rejection]:
    return router.on_request(now, request(id, text_of(tokens, f"prompt {id}"), now=now))


def ask(router: PoolRouter, id: str, tokens: int = 2000, *, now: float = 0.0) -> Decision | Queued | Rejection:
    return ask_all(router, id, tokens, now=now).answer


def decided(effects: Effects[object]) -> list[str]:
    """Return the queued requests that an event dispatched; fail if the event rejected a request."""
    assert all(isinstance(each, Decision) for each in effects.outcomes), effects
    return [each.request_id for each in effects.outcomes]


def held(router: PoolRouter) -> int:
    status = router.status()
    assert status.held >= sum(each.held for each in status.endpoints)
    return status.held
