"""A HorizontalPodAutoscaler as in Kubernetes 1.36: one external metric, target AverageValue 1, and ``behavior``.

Each sync computes the replicas from the metric, the current replicas and earlier decisions
(https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/). ``loop`` runs the syncs, and
``fleet`` applies the result.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Final

SYNC_S: Final = 15.0
"""Seconds between two syncs (kube-controller-manager's default)."""
_TOLERANCE: Final = 0.1
_SLACK: Final = 1e-9
"""Tolerates rounding: a sum that is an integer in decimal arithmetic may not be an integer in binary arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits the change within any ``period_s`` to a number of ``pods`` or to a percentage.

    ``percent`` refers to the replicas at the period's start. Either ``pods`` or ``percent`` is 0.
    """

    pods: int = 0
    percent: float = 0.0
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The ``behavior`` of one direction. Of several policies, the most permissive policy applies (selectPolicy Max)."""

    stabilization_s: float
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaSpec:
    """The fields of the HorizontalPodAutoscaler object. The defaults are those of manifests/examples/hpa.yaml."""

    min_replicas: int = 2
    max_replicas: int = 40
    up: Rules = field(
        default=Rules(
            stabilization_s=0.0, policies=(Policy(percent=100.0, period_s=60.0), Policy(pods=4, period_s=60.0))
        )
    )
    down: Rules = field(
        default=Rules(
            stabilization_s=600.0, policies=(Policy(percent=20.0, period_s=120.0), Policy(pods=1, period_s=120.0))
        )
    )


class Hpa:
    """The controller's state for one HorizontalPodAutoscaler object."""

    def __init__(self, spec: HpaSpec) -> None:
        self._spec = spec
        self._recommendations: deque[tuple[float, int]] = deque()
        # The times and numbers of added and removed replicas.
        self._added: deque[tuple[float, int]] = deque()
        self._removed: deque[tuple[float, int]] = deque()

    def sync(self, now: float, metric: float | None, *, requested: int, present: int) -> int:
        """Return the replicas to request. Without a metric the number stays unchanged.

        ``requested`` is the target's ``spec.replicas``. ``present`` is the target's ``status.replicas``, which is
        larger while pods drain.
        """
        if metric is None:
            return requested
        desired = present if abs(metric / present - 1) <= _TOLERANCE else ceil(metric - _SLACK)
        size = self._limited(now, self._stabilised(now, desired, requested), requested)
        if size > requested:
            self._added.append((now, size - requested))
        elif size < requested:
            self._removed.append((now, requested - size))
        return size

    def _stabilised(self, now: float, desired: int, requested: int) -> int:
        """Return the replicas after stabilization: the recent minimum for growing, the recent maximum for shrinking."""
        up, down = self._spec.up.stabilization_s, self._spec.down.stabilization_s
        if not self._recommendations:
            self._recommendations.append((now, requested))
        self._recommendations.append((now, desired))
        _forget(self._recommendations, now - max(up, down))
        least = min((each for at_s, each in self._recommendations if at_s > now - up), default=desired)
        most = max((each for at_s, each in self._recommendations if at_s > now - down), default=desired)
        return min(max(requested, least), most)

    def _limited(self, now: float, desired: int, requested: int) -> int:
        """Limit the replicas by the policies, the minimum and the maximum of the spec."""
        spec = self._spec
        if desired > requested:
            desired = min(desired, max(requested, *(self._most(now, each, requested) for each in spec.up.policies)))
        elif desired < requested:
            desired = max(desired, min(requested, *(self._least(now, each, requested) for each in spec.down.policies)))
        return min(max(desired, spec.min_replicas), spec.max_replicas)

    def _most(self, now: float, policy: Policy, requested: int) -> int:
        began = self._began(now, policy, requested)
        return ceil(began * (1 + policy.percent / 100) - _SLACK) + policy.pods

    def _least(self, now: float, policy: Policy, requested: int) -> int:
        began = self._began(now, policy, requested)
        return floor(began * (1 - policy.percent / 100) + _SLACK) - policy.pods

    def _began(self, now: float, policy: Policy, requested: int) -> int:
        """Return the number of replicas at the beginning of a policy's period."""
        since_s = now - policy.period_s
        return requested - _since(self._added, since_s) + _since(self._removed, since_s)


def _since(changes: Iterable[tuple[float, int]], since_s: float) -> int:
    return sum(replicas for at_s, replicas in changes if at_s > since_s)


def _forget(recommendations: deque[tuple[float, int]], until_s: float) -> None:
    while recommendations[0][0] < until_s:
        recommendations.popleft()
