"""When a Draining member is drained: what routers and its engine must have said (CONTRACT "Drain"; pure).

No router that still believes in an older ring may be forgotten: whoever answers counts until it has applied the
published version, on its way out too, and one that is ready and does not answer leaves the engine's word to decide.
"""

from typing import Final

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed, PoolStatus, RingMember, RouterReport

# A request may be on its way from a router to its engine, counted by neither for a moment.
LOOKS: Final = 2
_TAKING: Final = (MemberState.JOINING, MemberState.ACTIVE)


def draining(published: PoolStatus) -> tuple[RingMember, ...]:
    """Return the members published as Draining: of these routers and engines are asked."""
    return tuple(each for each in published.members if each.state is MemberState.DRAINING)


def idle(member: RingMember, observed: Observed) -> bool:
    """Whether, in this one look, nobody knows of a request at a Draining member or could still send one there."""
    at_engine = observed.engine_requests.get(member.id)
    if at_engine:
        return False
    heard = [router for router in observed.routers if router.heard]
    if any(_busy(router, member.id) for router in heard):
        return False
    if any(behind(router, observed.published.ring_version) for router in heard):
        return False
    if not heard or any(router.ready and not router.heard for router in observed.routers):
        return at_engine == 0
    return True


def drained(member: RingMember, observed: Observed) -> bool:
    """Whether a member has been found idle often enough in a row."""
    return observed.idle_looks.get(member.id, 0) >= LOOKS


def overdue(member: RingMember, timeout_s: float, now_s: float) -> bool:
    """Whether a member has been draining for ``timeout_s``; then it goes, busy or not."""
    return now_s - member.since_s >= timeout_s


def behind(router: RouterReport, ring_version: int) -> bool:
    """Whether a router still goes by an older ring. One of version 0 serves no such pool, and sends nobody there."""
    return 0 < router.ring_version < ring_version


def _busy(router: RouterReport, member: str) -> bool:
    """Whether a router has a request at a member, or would send one there: a version alone may be another pool's."""
    endpoint = router.endpoints.get(member)
    return endpoint is not None and (endpoint.in_flight + endpoint.held > 0 or endpoint.state in _TAKING)
