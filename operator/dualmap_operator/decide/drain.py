"""Decides whether a Draining member has drained, from reports of routers and of the member's engine.

A drain continues until every router that answers has applied the published ring; terminating routers are included. If a
ready router does not answer, the engine's metrics decide. All functions are pure. See docs/operator.md.
"""

from typing import Final

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed, PoolStatus, RingMember, RouterReport

# Two checks, because neither the router nor the engine counts a request during its transfer between them.
IDLE_CHECKS: Final = 2
_TAKING: Final = (MemberState.JOINING, MemberState.ACTIVE)


def draining(published: PoolStatus) -> tuple[RingMember, ...]:
    """Return the members published as Draining."""
    return tuple(each for each in published.members if each.state is MemberState.DRAINING)


def idle(member: RingMember, observed: Observed) -> bool:
    """Return whether a Draining member has no request in this observation and no router can send it a request."""
    at_engine = observed.engine_requests.get(member.id)
    if at_engine:
        return False
    answering = [router for router in observed.routers if router.answered]
    if any(_busy(router, member.id) for router in answering):
        return False
    if any(behind(router, observed.published.ring_version) for router in answering):
        return False
    if not answering or any(router.ready and not router.answered for router in observed.routers):
        return at_engine == 0
    return True


def drained(member: RingMember, observed: Observed) -> bool:
    """Return whether a member was idle in ``IDLE_CHECKS`` consecutive observations."""
    return observed.idle_checks.get(member.id, 0) >= IDLE_CHECKS


def overdue(member: RingMember, timeout_s: float, now_s: float) -> bool:
    """Return whether a member has been draining for ``timeout_s``; it is then removed even if it has requests."""
    return now_s - member.since_s >= timeout_s


def behind(router: RouterReport, ring_version: int) -> bool:
    """Return whether a router uses an older ring.

    A router with version 0 does not serve the pool and sends it no requests.
    """
    return 0 < router.ring_version < ring_version


def _busy(router: RouterReport, member: str) -> bool:
    """Return whether a router has requests at a member or still picks it, whatever ring version the router reports."""
    endpoint = router.endpoints.get(member)
    return endpoint is not None and (endpoint.in_flight + endpoint.held > 0 or endpoint.state in _TAKING)
