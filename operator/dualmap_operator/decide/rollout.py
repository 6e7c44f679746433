"""Rolling update: replaces one pod at a time after a change of the template. Pure.

The StatefulSet has the update strategy OnDelete and reports the revision that its pods should have. The operator drains
an outdated pod, deletes it, and continues when the new pod is Active.
"""

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed, ObservedPod
from dualmap_operator.decide.spec import PoolSpec


def outdated(spec: PoolSpec, observed: Observed) -> tuple[ObservedPod, ...]:
    """Return the pods of an older revision, in the order of replacement.

    Pods that do not serve come first, because their replacement interrupts no requests. The result is empty until the
    StatefulSet controller has observed the newest template.
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
    """Return the pod to replace now; None if no pod is outdated or the last replacement is not complete.

    A draining pod becomes Active again if no other member receives requests, unless the pool has one replica.
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
        # The last replaced pod must serve before the next replacement: a template with a failing container must not
        # replace every pod.
        waiting = [pod for pod in observed.pods if pod.terminating or (not pod.serving and pod not in old)]
        return None if waiting else old[0]
    whole = len(observed.pods) == spec.replicas and not any(pod.terminating for pod in observed.pods)
    active = all(states.get(pod.name) is MemberState.ACTIVE for pod in observed.pods)
    return old[0] if whole and active else None
