"""Logs the changes of a reload of the pools. Every source of pools uses ``log_changes``."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from dualmap.objects.times import time_text
from dualmap.pools.claims import Claimant, prefill_problem
from dualmap.pools.pool import Member, Pool
from dualmap_edge.logs import clipped, get_logger

_ENVOY_HINT: Final = "if Envoy's bootstrap comes from envoy-config --pool, run envoy-config again"
# The fields of a pool that the log line shows separately from the settings.
_NOT_SETTINGS: Final = ("namespace", "name", "members", "ring_version")
_log = get_logger(__name__)


def log_changes(before: Sequence[Pool], after: Sequence[Pool]) -> None:
    """Log each pool that was added, removed or changed; log a warning if a person has to act."""
    old, new = ({pool.id: pool for pool in pools} for pools in (before, after))
    for pool_id, pool in new.items():
        if pool_id not in old:
            members = clipped(member.id for member in pool.members)
            _log.warning(f"Added pool; {_ENVOY_HINT}", pool=pool_id, ring_version=pool.ring_version, added=members)
        elif pool != old[pool_id]:
            _log_change(old[pool_id], pool)
    for pool_id in old.keys() - new.keys():
        _log.warning(f"Removed pool; {_ENVOY_HINT}", pool=pool_id)


def log_prefill_problems(before: Sequence[Pool], after: Sequence[Pool]) -> None:
    """Log a warning for each pool that is now served without its prefill pool, with the reason."""
    known = prefill_problems(before)
    for pool_id, problem in prefill_problems(after).items():
        if known.get(pool_id) != problem:
            _log.warning("Serving the pool without its prefill pool", pool=pool_id, reason=problem)


def prefill_problems(pools: Sequence[Pool]) -> dict[str, str]:
    """Return why pools cannot use the prefill pool that they name, by the pool's ``namespace/name``."""
    claimants = {pool.id: Claimant.of(pool, "") for pool in pools}
    problems = {pool_id: prefill_problem(claimant, claimants) for pool_id, claimant in claimants.items()}
    return {pool_id: problem for pool_id, problem in problems.items() if problem}


def _log_change(old: Pool, new: Pool) -> None:
    was, now = ({member.id: member for member in pool.members} for pool in (old, new))
    _log.info(
        "Reloaded pool",
        pool=new.id,
        ring_version=new.ring_version,
        added=clipped(each for each in now if each not in was),
        removed=clipped(each for each in was if each not in now),
        changed=clipped(_changed(was[each], now[each]) for each in now if each in was and now[each] != was[each]),
        settings=[
            field.name
            for field in fields(Pool)
            if field.name not in _NOT_SETTINGS and getattr(old, field.name) != getattr(new, field.name)
        ],
    )
    wait_s = new.routing.queue.max_wait_s
    if wait_s > old.routing.queue.max_wait_s:
        # Envoy's timeout for the router's answer derives from maxWait. After this timeout, Envoy forwards the request
        # without a routing decision.
        _log.warning(f"Increased routing.queue.maxWait; {_ENVOY_HINT}", pool=new.id, max_wait_s=wait_s)
    # A pool without a version has version 0.
    if 0 < new.ring_version < old.ring_version:
        _log.warning(
            "Ring version decreased; an older pool may have replaced a newer one",
            pool=new.id,
            ring_version=new.ring_version,
            before=old.ring_version,
        )


def _changed(was: Member, now: Member) -> str:
    """Return a changed member's id, and the new values of the fields that differ, as ``status.ring.members`` has them.

    Incarnations are long and random, so only their change is named.
    """
    leave_at = "none" if now.leave_at_s is None else time_text(now.leave_at_s)
    new = {
        "address": now.endpoint if was.endpoint != now.endpoint else None,
        "state": now.state.value if was.state != now.state else None,
        "weight": now.weight if was.weight != now.weight else None,
        "leaveAt": leave_at if was.leave_at_s != now.leave_at_s else None,
        "incarnation": "new" if was.incarnation != now.incarnation else None,
    }
    return f"{now.id} ({', '.join(f'{name} {value}' for name, value in new.items() if value is not None)})"
