"""What the pods of one pool say before the operator has: who has stopped serving, and who was started anew. Pure.

The operator decides who is on the rings; it needs a moment, and may be away. Until its word is newer, a member whose
pod does not serve is given to the picker as Draining (nothing new goes there, what runs there ends there), and one
whose pod was restarted in place as the empty one it is. The ring version stays: it counts the operator's words.
``pools.kube`` brings pods and pools; ``dualmap.objects.pods`` says what a pod's body means.
"""

from collections.abc import Iterable
from dataclasses import replace

from dualmap.objects.pods import PodFacts
from dualmap.pools.pool import Member, MemberState, Pool


class PoolPods:
    """The pods of one pool by name, which is the id of the member that each one is (INFERENCEPOOL)."""

    def __init__(self) -> None:
        # None for a pod that is gone. A member whose pod was never seen may be no pod at all: it is not here.
        self._pods: dict[str, PodFacts | None] = {}
        # Members of which the pool's own object said something newer than their pod did.
        self._overruled: set[str] = set()
        self._members: dict[str, Member] = {}

    def seen(self, pod: PodFacts) -> None:
        """Take a pod that is new or has changed."""
        self._pods[pod.name] = pod
        self._overruled.discard(pod.name)

    def gone(self, name: str) -> None:
        """Take note that a pod is no more."""
        if name in self._members:
            self._pods[name] = None
            self._overruled.discard(name)
        else:
            self._pods.pop(name, None)

    def listed(self, pods: Iterable[PodFacts]) -> None:
        """Take these pods for all there are."""
        present = {pod.name: pod for pod in pods}
        for name in self._pods.keys() - present.keys():
            self.gone(name)
        for pod in present.values():
            self.seen(pod)

    def published(self, pool: Pool) -> None:
        """Take a version of the pool; what it says anew of a member counts until the member's pod is heard of again."""
        members = {member.id: member for member in pool.members}
        for member in pool.members:
            if _is_said_anew(self._members.get(member.id), member):
                self._overruled.add(member.id)
        self._overruled &= members.keys()
        self._pods = {name: pod for name, pod in self._pods.items() if pod is not None or name in members}
        self._members = members

    def applied(self, pool: Pool) -> Pool:
        """Return the pool with its members as their pods have them."""
        members = tuple(self._as_its_pod(member) for member in pool.members)
        return pool if members == pool.members else replace(pool, members=members)

    def _as_its_pod(self, member: Member) -> Member:
        if member.id not in self._pods or member.id in self._overruled:
            return member
        pod = self._pods[member.id]
        if pod is None or pod.terminating or not pod.serving or pod.address != member.address:
            return member if member.state is MemberState.DRAINING else replace(member, state=MemberState.DRAINING)
        # A restarted one is another only where the operator says which life it published.
        return replace(member, incarnation=pod.incarnation) if member.incarnation else member


def _is_said_anew(before: Member | None, now: Member) -> bool:
    """Whether the operator has let a member in since, or knows another life of it: it has seen the pod serve."""
    if now.state is MemberState.DRAINING:
        return False
    if before is None or before.state is MemberState.DRAINING:
        return True
    return (before.endpoint, before.incarnation) != (now.endpoint, now.incarnation)
