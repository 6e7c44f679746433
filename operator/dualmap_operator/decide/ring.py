"""Computes the next members of the ring from the published members and the pods. Pure; see docs/operator.md.

    pod serves --(settled)--> Joining --(ramp)--> Active --(leaving, or pod terminates)--> Draining --> gone
                                                     ^------------- taken back --------------'

A pod with notice must stop at a known time. Its member is Draining with this time, until the pod stops or the notice is
withdrawn. A pod with notice that serves also joins as Draining: routers use such members if a pool has no other.

A pod that stops serving leaves the ring at once, from any state except a drain that the operator started. When a pod
serves again, its member is Joining. The member has its old keys, because its id is the pod's name. The member's cache
counts as empty, because the incarnation differs.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from dualmap.objects.times import shown_time
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import ObservedPod, RingMember
from dualmap_operator.decide.spec import PoolSpec

# The steps in which a new member with a cold cache gets its keys. Each step is a pair: seconds after joining, and the
# weight from that time on.
RAMP: Final = ((0.0, 25), (10.0, 50), (20.0, 75))
RAMP_S: Final = 30.0
FULL_WEIGHT: Final = 100
# The time that a pod must serve before it joins again, after one loss of readiness; it doubles with each further loss.
_SETTLE_S: Final = 5.0
_SETTLE_MOST_S: Final = 30.0


def next_members(
    spec: PoolSpec,
    published: Iterable[RingMember],
    pods: Iterable[ObservedPod],
    *,
    leaving: Collection[str],
    now_s: float,
) -> tuple[RingMember, ...]:
    """Return the ring's members to publish now; ``leaving`` contains the names of the pods to drain."""
    was = {member.id: member for member in published}
    members: list[RingMember] = []
    for pod in pods:
        member = _next(spec, was.get(pod.name), pod, leaving=pod.name in leaving, now_s=now_s)
        if member is not None:
            members.append(member)
    return _promoted(_distinct(members), now_s)


def surviving(
    published: Iterable[RingMember], pods: Iterable[ObservedPod], *, leaving: bool, now_s: float
) -> tuple[RingMember, ...]:
    """Return the remaining members of a pool with an unreadable spec; no pod joins.

    If no pod is known, every member stays: only the spec defines which pods belong to the pool.
    """
    known = {pod.name: pod for pod in pods}
    members = []
    for member in published:
        pod = known.get(member.id)
        if known and (pod is None or not pod.serving or pod.address != member.address):
            continue
        going = leaving or (pod is not None and pod.terminating)
        if going and member.state is not MemberState.DRAINING:
            member = replace(member, state=MemberState.DRAINING, since_s=now_s)
        members.append(member)
    return tuple(members)


def version_after(version: int, before: Iterable[RingMember], after: Iterable[RingMember]) -> int:
    """Return the ring's version: increased by one if a member joins, leaves, or changes any field except its weight."""
    return version + (_identities(before) != _identities(after))


def settle_s(pod: ObservedPod) -> float:
    """Return the seconds that a pod must serve before it joins; 0 without a recent loss of readiness."""
    return min(_SETTLE_MOST_S, _SETTLE_S * 2 ** (pod.flaps - 1)) if pod.flaps else 0.0


def next_change_s(members: Iterable[RingMember], pods: Iterable[ObservedPod], now_s: float) -> float | None:
    """Return the seconds until the ring changes without an event: the next weight step, or a pod that may join."""
    due = [
        member.since_s + step
        for member in members
        if member.state is MemberState.JOINING
        for step in (*(at for at, _ in RAMP), RAMP_S)
    ]
    present = {member.id for member in members}
    due += [pod.serving_since_s + settle_s(pod) for pod in pods if pod.serving and pod.name not in present]
    return min((at - now_s for at in due if at > now_s), default=None)


def _next(
    spec: PoolSpec, was: RingMember | None, pod: ObservedPod, *, leaving: bool, now_s: float
) -> RingMember | None:
    """Return one pod's member; None if the pod is not in the ring."""
    same = was is not None and (was.address, was.port, was.incarnation) == (
        pod.address,
        spec.engine.port,
        pod.incarnation,
    )
    if not pod.address:
        return None
    leave_at_s = _leave_at_s(spec, pod)
    if leaving or pod.terminating:
        member = _draining_member(spec, was, pod, same=same, leaving=leaving, now_s=now_s)
        return None if member is None else _noticed(member, pod, leave_at_s)
    if not pod.serving:
        return None
    if leave_at_s is not None:
        drains = was is not None and was.state is MemberState.DRAINING
        since_s = was.since_s if was is not None and drains else now_s
        return _noticed(_member(spec, pod, MemberState.DRAINING, FULL_WEIGHT, since_s), pod, leave_at_s)
    if was is None or not same:
        if was is None and now_s - pod.serving_since_s < settle_s(pod):
            return None
        return _member(spec, pod, MemberState.JOINING, RAMP[0][1], now_s)
    if was.state is MemberState.DRAINING:
        return _member(spec, pod, MemberState.ACTIVE, FULL_WEIGHT, now_s)
    if was.state is MemberState.JOINING:
        return _ramped(spec, was, pod, now_s)
    return was


def _draining_member(
    spec: PoolSpec, was: RingMember | None, pod: ObservedPod, *, same: bool, leaving: bool, now_s: float
) -> RingMember | None:
    """Return the member of a terminating pod or a pod to drain: Draining if it was in the ring, else None.

    A pod to drain stays in the ring even if it stops serving. A probe may fail or a sidecar may restart while responses
    still stream.
    """
    if was is None or was.address != pod.address:
        return None
    if was.state is MemberState.DRAINING:
        return was if pod.serving or leaving else None
    if not same or not (pod.serving or leaving):
        return None
    return _member(spec, pod, MemberState.DRAINING, was.weight, now_s)


def _leave_at_s(spec: PoolSpec, pod: ObservedPod) -> float | None:
    """Return the time at which a pod must stop; None for a pod without notice.

    The normal termination of a pod is no notice: its grace period covers drain.timeout.
    """
    times_s = [pod.leave_at_s]
    if pod.terminating and pod.grace_s < spec.drain_timeout_s:
        times_s.append(pod.killed_at_s)
    # A published time must equal the planned one, or every plan would change the ring.
    return min((shown_time(each) for each in times_s if each is not None), default=None)


def _noticed(member: RingMember, pod: ObservedPod, leave_at_s: float | None) -> RingMember:
    """Return a Draining member with the time at which it must stop.

    An engine may reject requests from the begin of its termination on, so the routers must send it no more.
    """
    weight = 0 if pod.terminating and leave_at_s is not None else member.weight
    return replace(member, leave_at_s=leave_at_s, weight=weight)


def _ramped(spec: PoolSpec, was: RingMember, pod: ObservedPod, now_s: float) -> RingMember:
    age_s = now_s - was.since_s
    if age_s >= RAMP_S:
        return _member(spec, pod, MemberState.ACTIVE, FULL_WEIGHT, now_s)
    # age_s is negative if the clock was set back.
    weight = max((weight for at_s, weight in RAMP if at_s <= age_s), default=RAMP[0][1])
    return _member(spec, pod, MemberState.JOINING, weight, was.since_s)


def _promoted(members: tuple[RingMember, ...], now_s: float) -> tuple[RingMember, ...]:
    """Return the members; if no member is Active, all Joining members become Active at once."""
    if any(member.state is MemberState.ACTIVE for member in members):
        return members
    return tuple(
        replace(member, state=MemberState.ACTIVE, weight=FULL_WEIGHT, since_s=now_s)
        if member.state is MemberState.JOINING
        else member
        for member in members
    )


def _distinct(members: Iterable[RingMember]) -> tuple[RingMember, ...]:
    """Return one member for each address and port, as routers require: two pods may briefly have the same address."""
    kept: dict[tuple[str, int], RingMember] = {}
    for member in sorted(members, key=lambda each: (each.state is MemberState.DRAINING, each.id)):
        kept.setdefault((member.address, member.port), member)
    return tuple(sorted(kept.values(), key=lambda member: member.id))


def _member(spec: PoolSpec, pod: ObservedPod, state: MemberState, weight: int, since_s: float) -> RingMember:
    return RingMember(
        id=pod.name,
        address=pod.address,
        port=spec.engine.port,
        state=state,
        weight=weight,
        since_s=since_s,
        incarnation=pod.incarnation,
    )


def _identities(members: Iterable[RingMember]) -> frozenset[tuple[object, ...]]:
    return frozenset(
        (each.id, each.address, each.port, each.state, each.incarnation, each.leave_at_s) for each in members
    )
