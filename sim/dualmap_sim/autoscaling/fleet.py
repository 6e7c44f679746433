"""The pods of a pool and the members of its ring, as the operator and a StatefulSet manage them (docs/operator.md).

Pods are numbered; scaling adds and removes the highest numbers. A new pod starts, joins the ring with a weight that
grows in steps, and serves. The operator drains a pod before its removal. The StatefulSet shrinks when all pods to
remove are drained. The module is pure: ``loop`` passes in the time and the requested replicas, and sends the ring to
the routers.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Final

from dualmap.pools.pool import Member, MemberState

RAMP: Final = ((0.0, 25), (10.0, 50), (20.0, 75), (30.0, 100))
"""The weight of a joining member by seconds since it joined; the last step makes the member Active."""
IDLE_CHECK_S: Final = 0.5
"""Seconds between two idle checks of a draining member."""
_IDLE_CHECKS: Final = 2
_PORT: Final = 8000


@dataclass(slots=True, kw_only=True)
class Pod:
    """One pod. ``serves_s`` is the time at which the engine is ready. ``gone_s`` is the time of deletion, or None.

    ``joined_s`` is the time at which the pod joined the ring, None until then. A pod that is Active without a ramp has
    ``-inf``.
    """

    number: int
    address: str
    created_s: float
    serves_s: float
    joined_s: float | None = None
    gone_s: float | None = None
    draining: bool = False
    idle_checks: int = 0

    @property
    def id(self) -> str:
        """The member's id in the ring."""
        return f"qwen-{self.number}"

    @property
    def endpoint(self) -> str:
        """``ip:port``, unique among all pods."""
        return f"{self.address}:{_PORT}"

    @property
    def drained(self) -> bool:
        """Whether the pod was idle at enough consecutive idle checks."""
        return self.draining and self.idle_checks >= _IDLE_CHECKS


class Fleet:
    """The pods of a pool. ``pods`` also contains the deleted pods, in order of creation."""

    def __init__(self, replicas: int, *, start_s: float) -> None:
        self._start_s = start_s
        self.requested = replicas
        """``spec.replicas``."""
        self.pods: list[Pod] = []
        self._alive: list[Pod] = []
        for _ in range(replicas):
            self._create(0.0, serves_s=0.0, joined_s=-inf)

    @property
    def present(self) -> int:
        """``status.replicas``: all existing pods, including those that start or drain."""
        return len(self._alive)

    @property
    def serving(self) -> int:
        """Number of pods that receive requests."""
        return sum(pod.joined_s is not None and not pod.draining for pod in self._alive)

    @property
    def draining(self) -> tuple[str, ...]:
        """The ids of the members that are draining."""
        return tuple(pod.id for pod in self._alive if pod.draining)

    def scale(self, now: float, replicas: int) -> None:
        """Set the requested replicas: create missing pods, reactivate draining pods, or start to drain pods."""
        self.requested = replicas
        while len(self._alive) < replicas:
            self._create(now, serves_s=now + self._start_s, joined_s=None)
        for pod in self._alive:
            leaves = pod.number >= replicas and pod.joined_s is not None
            if pod.draining and not leaves:
                # The pod is warm, so it needs no ramp.
                pod.joined_s = -inf
            if leaves != pod.draining:
                pod.draining, pod.idle_checks = leaves, 0
        self._shrink(now)

    def check_idle(self, now: float, idle: Collection[str]) -> None:
        """Record which draining pods are idle at this check, and remove the drained pods."""
        for pod in self._alive:
            if pod.draining:
                pod.idle_checks = pod.idle_checks + 1 if pod.id in idle else 0
        self._shrink(now)

    def members(self, now: float) -> tuple[Member, ...]:
        """Return the current ring; pods that have started join the ring."""
        members = []
        for pod in self._alive:
            if pod.joined_s is None and pod.serves_s <= now and pod.number < self.requested:
                pod.joined_s = now
            if pod.joined_s is not None and not pod.drained:
                members.append(_member(pod, now - pod.joined_s))
        return tuple(members)

    def next_change_s(self, now: float) -> float | None:
        """Return the next time at which a pod joins or a weight grows, None if no such change is due."""
        due = [pod.serves_s for pod in self._alive if pod.joined_s is None and pod.number < self.requested]
        due += [
            pod.joined_s + step_s
            for pod in self._alive
            for step_s, _ in RAMP
            if pod.joined_s is not None and not pod.draining
        ]
        return min((each for each in due if each > now), default=None)

    def _create(self, now: float, *, serves_s: float, joined_s: float | None) -> None:
        made = len(self.pods)
        pod = Pod(
            number=len(self._alive),
            address=f"10.0.{made >> 8}.{made & 255}",
            created_s=now,
            serves_s=serves_s,
            joined_s=joined_s,
        )
        self.pods.append(pod)
        self._alive.append(pod)

    def _shrink(self, now: float) -> None:
        """Delete the pods beyond the requested replicas if each is drained or was never in the ring."""
        leaving = self._alive[self.requested :]
        if all(pod.drained or not pod.draining for pod in leaving):
            for pod in leaving:
                pod.gone_s = now
            del self._alive[self.requested :]


def _member(pod: Pod, age_s: float) -> Member:
    weight = max(weight for step_s, weight in RAMP if step_s <= age_s)
    state = MemberState.ACTIVE if weight == RAMP[-1][1] else MemberState.JOINING
    return Member(
        id=pod.id,
        address=pod.address,
        port=_PORT,
        state=MemberState.DRAINING if pod.draining else state,
        weight=weight,
        incarnation=pod.address,
    )
