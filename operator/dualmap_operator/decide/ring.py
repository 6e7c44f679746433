"""Who is in the ring next: published members and pods in, members out (CONTRACT "Ring"; pure).

    pod serves --(settled)--> Joining --(ramp)--> Active --(leaving, or pod terminates)--> Draining --> gone
                                                     ^------------- taken back --------------'

A pod that stops serving leaves at once, from any state; it comes back as Joining, with its old keys (identity is the
pod's name) and an empty cache (its incarnation differs).
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import ObservedPod, RingMember
from dualmap_operator.decide.spec import PoolSpec

# A cold instance takes over its keys by and by: its weight from so many seconds after it joined.
RAMP: Final = ((0.0, 25), (10.0, 50), (20.0, 75))
RAMP_S: Final = 30.0
FULL_WEIGHT: Final = 100
# How long a pod must have been serving before it joins again after it lost readiness once, twice, ...
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
    """Return the ring's members as they should be published now; ``leaving`` names pods that are to be drained."""
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
    """Return who of the published members is left of a pool whose spec cannot be read: nobody joins.

    Without any pod known nobody is dropped: which pods are the pool's stands in the spec.
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
    """Return the ring's version: one more than before when anybody came, went or changed in more than weight."""
    return version + (_identities(before) != _identities(after))


def settle_s(pod: ObservedPod) -> float:
    """Return how long a pod must have been serving before it joins: not at all if it never lost readiness lately."""
    return min(_SETTLE_MOST_S, _SETTLE_S * 2 ** (pod.flaps - 1)) if pod.flaps else 0.0


def next_change_s(members: Iterable[RingMember], pods: Iterable[ObservedPod], now_s: float) -> float | None:
    """Return in how many seconds time alone will change the ring: the ramp's next step, or a pod that has settled."""
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
    """Return one pod's place in the ring, None where it has none."""
    same = was is not None and (was.address, was.port, was.incarnation) == (
        pod.address,
        spec.engine.port,
        pod.incarnation,
    )
    if not pod.address:
        return None
    if leaving or pod.terminating:
        return _on_its_way_out(spec, was, pod, same=same, leaving=leaving, now_s=now_s)
    if not pod.serving:
        return None
    if was is None or not same:
        if was is None and now_s - pod.serving_since_s < settle_s(pod):
            return None
        return _member(spec, pod, MemberState.JOINING, RAMP[0][1], now_s)
    if was.state is MemberState.DRAINING:
        return _member(spec, pod, MemberState.ACTIVE, FULL_WEIGHT, now_s)
    if was.state is MemberState.JOINING:
        return _ramped(spec, was, pod, now_s)
    return was


def _on_its_way_out(
    spec: PoolSpec, was: RingMember | None, pod: ObservedPod, *, same: bool, leaving: bool, now_s: float
) -> RingMember | None:
    """Return the place of a pod that is to be drained or terminates: Draining if it was in the ring at all.

    An engine may fail its probes, or a sidecar restart, while streams still run: who is to be drained is waited for.
    """
    if was is None or was.address != pod.address:
        return None
    if was.state is MemberState.DRAINING:
        return was if pod.serving or leaving else None
    if not same or not (pod.serving or leaving):
        return None
    return _member(spec, pod, MemberState.DRAINING, was.weight, now_s)


def _ramped(spec: PoolSpec, was: RingMember, pod: ObservedPod, now_s: float) -> RingMember:
    age_s = now_s - was.since_s
    if age_s >= RAMP_S:
        return _member(spec, pod, MemberState.ACTIVE, FULL_WEIGHT, now_s)
    # A clock that was set back must not empty the choice.
    weight = max((weight for at_s, weight in RAMP if at_s <= age_s), default=RAMP[0][1])
    return _member(spec, pod, MemberState.JOINING, weight, was.since_s)


def _promoted(members: tuple[RingMember, ...], now_s: float) -> tuple[RingMember, ...]:
    """Without any Active member there is nobody to spare the cold ones: all that join are Active at once."""
    if any(member.state is MemberState.ACTIVE for member in members):
        return members
    return tuple(
        replace(member, state=MemberState.ACTIVE, weight=FULL_WEIGHT, since_s=now_s)
        if member.state is MemberState.JOINING
        else member
        for member in members
    )


def _distinct(members: Iterable[RingMember]) -> tuple[RingMember, ...]:
    """Keep one member for each address and port, which routers insist on: an address outlives its last pod's object."""
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


def _identities(members: Iterable[RingMember]) -> frozenset[tuple[str, str, int, MemberState, str]]:
    return frozenset((each.id, each.address, each.port, each.state, each.incarnation) for each in members)
