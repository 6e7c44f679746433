"""Rolling update: after a change of the template, replaces one pod at a time. Pure.

The StatefulSet's update strategy is OnDelete: it names the revision that pods should have. The operator drains an
outdated pod, deletes it, and continues when its successor is Active.
"""

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed, ObservedPod
from dualmap_operator.decide.spec import PoolSpec


def outdated(spec: PoolSpec, observed: Observed) -> tuple[ObservedPod, ...]:
    """Return the pods of an older revision, in the order in which they are replaced.

    Pods that do not serve come first: replacing them costs nothing. Empty until the StatefulSet controller has observed
    the newest template.
    """
    statefulset = observed.statefulset
    if statefulset is None or statefulset.observed_generation < statefulset.generation:
        return ()
    old = [
        pod
        for pod in observed.pods
        if pod.revision != statefulset.update_revision
        and not pod.terminating
        and pod.ordinal is not None
        and pod.ordinal < spec.replicas
    ]
    return tuple(sorted(old, key=lambda pod: (pod.serving, -(pod.ordinal or 0))))


def next_to_replace(spec: PoolSpec, observed: Observed) -> ObservedPod | None:
    """Return the pod to replace now, None if there is none or the last replacement is not done.

    A draining pod is taken back if no other member takes requests meanwhile, unless the pool has one replica.
    """
    old = outdated(spec, observed)
    states = {member.id: member.state for member in observed.published.members}
    serving = {pod.name for pod in observed.pods if pod.serving and not pod.terminating}
    taken = any(state is not MemberState.DRAINING and member in serving for member, state in states.items())
    for pod in old:
        if states.get(pod.name) is MemberState.DRAINING:
            return pod if taken or spec.replicas == 1 or not pod.serving else None
    if not old:
        return None
    if not old[0].serving:
        # The last successor must serve first; otherwise a template that cannot start would replace every pod.
        waiting = [pod for pod in observed.pods if pod.terminating or (not pod.serving and pod not in old)]
        return None if waiting else old[0]
    whole = len(observed.pods) == spec.replicas and not any(pod.terminating for pod in observed.pods)
    active = all(states.get(pod.name) is MemberState.ACTIVE for pod in observed.pods)
    return old[0] if whole and active else None
