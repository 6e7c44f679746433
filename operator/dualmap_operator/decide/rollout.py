"""One pod at a time through the ring when the template has changed (CONTRACT "Children", issue 6; pure).

The StatefulSet's strategy is OnDelete: it says which revision pods should have and leaves it to us to take an outdated
one out of the ring, wait for its drain, delete it, and go on when its successor is Active.
"""

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed, ObservedPod
from dualmap_operator.decide.spec import PoolSpec


def outdated(spec: PoolSpec, observed: Observed) -> tuple[ObservedPod, ...]:
    """Return the pods of an older revision than the StatefulSet wants, in the order in which they are replaced.

    Pods that serve nobody come first: replacing those costs nothing. None while the StatefulSet has not yet looked at
    its newest template.
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
    """Return the pod that is or should now be on its way out, None when there is none or it is not yet its turn.

    One that drains already is taken back when meanwhile nobody else takes requests, unless it is the only one wanted.
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
        # The last one that was replaced must serve first, or a template that cannot start would take them all.
        waiting = [pod for pod in observed.pods if pod.terminating or (not pod.serving and pod not in old)]
        return None if waiting else old[0]
    whole = len(observed.pods) == spec.replicas and not any(pod.terminating for pod in observed.pods)
    active = all(states.get(pod.name) is MemberState.ACTIVE for pod in observed.pods)
    return old[0] if whole and active else None
