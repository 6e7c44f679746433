"""Applies the state of a pool's pods to its members before the operator publishes this state.

The operator decides which members are on the rings, but the operator reacts with a delay and may be down. Until the
operator publishes a newer state, the picker treats a member without a serving pod as Draining. Such a member gets no
new requests and finishes its requests in flight. If a pod was restarted in place, its member gets a new incarnation,
with an empty cache. The ring version remains the version that the operator published. This module does no I/O:
``pools.kube`` supplies pods and pools, and ``dualmap.objects.pods`` reads a pod's fields.
"""

from collections.abc import Iterable
from dataclasses import replace

from dualmap.objects.pods import PodFacts
from dualmap.pools.pool import Member, MemberState, Pool


class PoolPods:
    """The pods of one pool, by name. A pod's name is the member's id."""

    def __init__(self) -> None:
        # The value is None for a deleted pod, whose member is then treated as Draining. If the router has never seen a
        # pod of a member's name, the member has no entry and keeps its published state: perhaps it is not a pod.
        self._pods: dict[str, PodFacts | None] = {}
        # The members for which the pool object has a newer state than the pod.
        self._overruled: set[str] = set()
        self._members: dict[str, Member] = {}

    def seen(self, pod: PodFacts) -> None:
        """Add or replace a pod."""
        self._pods[pod.name] = pod
        self._overruled.discard(pod.name)

    def gone(self, name: str) -> None:
        """Mark a pod as deleted."""
        if name in self._members:
            self._pods[name] = None
            self._overruled.discard(name)
        else:
            self._pods.pop(name, None)

    def listed(self, pods: Iterable[PodFacts]) -> None:
        """Replace all pods with ``pods``."""
        present = {pod.name: pod for pod in pods}
        for name in self._pods.keys() - present.keys():
            self.gone(name)
        for pod in present.values():
            self.seen(pod)

    def published(self, pool: Pool) -> None:
        """Apply a version of the pool. A member changed by this version keeps the new state until its pod changes."""
        members = {member.id: member for member in pool.members}
        for member in pool.members:
            if _is_said_anew(self._members.get(member.id), member):
                self._overruled.add(member.id)
        self._overruled &= members.keys()
        self._pods = {name: pod for name, pod in self._pods.items() if pod is not None or name in members}
        self._members = members

    def applied(self, pool: Pool) -> Pool:
        """Return the pool with its members in the state of their pods."""
        members = tuple(self._as_its_pod(member) for member in pool.members)
        return pool if members == pool.members else replace(pool, members=members)

    def _as_its_pod(self, member: Member) -> Member:
        if member.id not in self._pods or member.id in self._overruled:
            return member
        pod = self._pods[member.id]
        if pod is None or pod.terminating or not pod.serving or pod.address != member.address:
            # A member that leaves soon may still get requests, but not after its pod has begun to stop.
            weight = member.weight if member.leave_at_s is None else 0
            return _draining(replace(member, weight=weight))
        if pod.leave_at_s is not None and member.leave_at_s is None:
            member = _draining(replace(member, leave_at_s=pod.leave_at_s))
        # The pod's incarnation applies only if the operator publishes incarnations.
        return replace(member, incarnation=pod.incarnation) if member.incarnation else member


def _draining(member: Member) -> Member:
    return replace(member, state=MemberState.DRAINING)


def _is_said_anew(before: Member | None, now: Member) -> bool:
    """Return whether the operator added or reactivated a member, or changed its endpoint or incarnation.

    After such a change, the operator has observed that the pod serves.
    """
    if now.state is MemberState.DRAINING:
        return False
    if before is None or before.state is MemberState.DRAINING:
        return True
    return (before.endpoint, before.incarnation) != (now.endpoint, now.incarnation)
