"""Helpers for the tests of desired replicas: a pool's state and traffic."""

import builders
from dualmap.pools.pool import Engine, MemberState, Pool
from dualmap.requests import EndpointStatus, PoolSnapshot
from dualmap.scaling.scaling import Scaling

SPEED = 10_000.0
TOKENS = 2000


def pool(members: int = 4) -> Pool:
    return builders.pool(members, engine=Engine(prefill_tokens_per_second=SPEED))


def status(
    members: int = 4,
    *,
    pending: int = 0,
    held: int = 0,
    waiting: int = 0,
    peers: int = 0,
    speed: float = SPEED,
    beside_others: float = 0.0,
    draining: int = 0,
) -> PoolSnapshot:
    """Return a pool whose members each have ``pending`` and ``held`` tokens; the last ``draining`` members drain.

    ``beside_others`` is the speed that this router measures while other routers' prefills slow the members down.
    """
    endpoints = tuple(
        EndpointStatus(
            id=f"m-{n}",
            endpoint=f"10.0.0.{n + 1}:8000",
            state=(MemberState.DRAINING if n >= members - draining else MemberState.ACTIVE).value,
            weight=100,
            in_flight=0,
            held=0,
            pending_prefill_tokens=pending,
            held_prefill_tokens=held,
            active_kv_tokens=0,
            indexed_blocks=0,
            prefill_tokens_per_second=beside_others or speed,
            solo_tokens_per_second=speed,
            suspended=False,
        )
        for n in range(members)
    )
    return PoolSnapshot(
        pool="llm/qwen",
        ring_version=1,
        held=waiting,
        sessions=0,
        peers=peers,
        endpoints=endpoints,
        hotness_nodes=0,
        split_prefixes=0,
    )


def steady(scaling: Scaling, *, rate: float, since: float, until: float, cached: int = 0) -> None:
    """Send ``rate`` requests per second with TOKENS uncached tokens each."""
    for n in range(round(rate * (until - since))):
        scaling.window.add(since + n / rate, uncached_tokens=TOKENS, cached_tokens=cached)


def desired(scaling: Scaling, now: float, state: PoolSnapshot) -> float:
    return scaling.signals(now, state).desired_replicas
