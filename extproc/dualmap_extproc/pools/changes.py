"""What a reload of pools changed, in log lines for the operator: every source of pools logs through ``log_changes``."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Final

from dualmap.pools.pool import Pool
from dualmap_edge.logs import get_logger

# A pool may have tens of thousands of members; a line names so many and counts the rest.
_IDS_SHOWN: Final = 20
_ENVOY_HINT: Final = "an Envoy that envoy-config set up with --pool needs it run again; one with --discover does not"
# Said in words of their own, beside the settings.
_NOT_SETTINGS: Final = ("namespace", "name", "members", "ring_version")
_log = get_logger(__name__)


def log_changes(before: Sequence[Pool], after: Sequence[Pool]) -> None:
    """Log each pool that appeared, vanished or changed, and with a warning what the operator should look at."""
    old, new = ({pool.id: pool for pool in pools} for pools in (before, after))
    for pool_id, pool in new.items():
        if pool_id not in old:
            members = clipped(member.id for member in pool.members)
            _log.warning(f"a pool appeared; {_ENVOY_HINT}", pool=pool_id, ring_version=pool.ring_version, added=members)
        elif pool != old[pool_id]:
            _log_change(old[pool_id], pool)
    for pool_id in old.keys() - new.keys():
        _log.warning(f"a pool vanished; {_ENVOY_HINT}", pool=pool_id)


def _log_change(old: Pool, new: Pool) -> None:
    was, now = ({member.id: member for member in pool.members} for pool in (old, new))
    _log.info(
        "pool reloaded",
        pool=new.id,
        ring_version=new.ring_version,
        added=clipped(each for each in now if each not in was),
        removed=clipped(each for each in was if each not in now),
        changed=clipped(each for each in now if each in was and now[each] != was[each]),
        settings=[
            field.name
            for field in fields(Pool)
            if field.name not in _NOT_SETTINGS and getattr(old, field.name) != getattr(new, field.name)
        ],
    )
    wait_s = new.routing.queue.max_wait_s
    if wait_s > old.routing.queue.max_wait_s:
        # Envoy's timeout for an answer of the router's is made of it, and what waits longer is sent on unrouted.
        _log.warning(f"spec.routing.queue.maxWait grew; {_ENVOY_HINT}", pool=new.id, max_wait_s=wait_s)
    # 0 is what a pool without a version has.
    if 0 < new.ring_version < old.ring_version:
        _log.warning(
            "the ring version went backwards: an old pool may have been written over a newer one",
            pool=new.id,
            ring_version=new.ring_version,
            before=old.ring_version,
        )


def clipped(ids: Iterable[str]) -> list[str]:
    """Return member ids for a log line: the first of them, and how many more there are."""
    listed = list(ids)
    more = len(listed) - _IDS_SHOWN
    return [*listed[:_IDS_SHOWN], f"and {more} more"] if more > 0 else listed
