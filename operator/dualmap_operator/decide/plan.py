"""The decision of one reconcile: a pure function that computes a plan from the spec and the observed state.

Reconciles share no state except the objects in the API server, so a restarted operator continues at any step. The
modules ``ring``, ``drain``, ``rollout`` and ``conditions`` contain the rules; this module combines them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from dualmap.objects.pods import LEAVE_AT
from dualmap.objects.times import TIME_ACCEPTED, time_text
from dualmap.pools.pool import MemberState
from dualmap_operator.decide import drain, ring, rollout
from dualmap_operator.decide.conditions import conditions, named, no_member_due_s, refused
from dualmap_operator.decide.observed import Condition, Observed, ObservedPod, PoolStatus, RingMember
from dualmap_operator.decide.plan_values import Event, Gate, Plan, Restart
from dualmap_operator.decide.spec import DRAIN_TIMEOUT_S, PoolSpec, TemplateWorkload, selector_text
from dualmap_operator.decide.workload.checks import template_warnings
from dualmap_operator.decide.workload.children import children
from dualmap_operator.names import POOL_LABEL, ConditionType, EventReason

# The time to the next reconcile while members drain, while routers apply a new ring, and in all other states.
DRAIN_INTERVAL_S: Final = 0.5
SYNC_INTERVAL_S: Final = 1.0
REST_INTERVAL_S: Final = 30.0
_VALUE_SHOWN: Final = 40


def plan(spec: PoolSpec, observed: Observed, now_s: float) -> Plan:
    """Return the plan for a pool; ``now_s`` and all times in ``observed`` are seconds since the epoch."""
    observed = replace(observed, pods=tuple(pod for pod in observed.pods if not pod.ended))
    published = observed.published
    replacing = None if spec.deleting else rollout.next_to_replace(spec, observed)
    leaving = _leaving(spec, observed, replacing)
    members = ring.next_members(spec, published.members, observed.pods, leaving=leaving, now_s=now_s)
    replicas = _replicas(spec, observed, now_s)
    warnings = (*template_warnings(spec), *_invalid_notices(observed.pods))
    status = PoolStatus(
        observed_generation=spec.generation,
        replicas=len(observed.pods),
        ready_replicas=sum(pod.ready for pod in observed.pods),
        in_ring=sum(member.state is MemberState.ACTIVE for member in members),
        selector=selector_text(spec, POOL_LABEL),
        ring_version=_version(observed, members),
        members=members,
        traffic=observed.traffic,
        conditions=conditions(spec, observed, members, warnings, now_s, waits_for_survivors=_must_wait(spec, observed)),
    )
    restarts = _restarts(spec, observed, replacing, now_s)
    return Plan(
        children=() if spec.deleting else children(spec, replicas=replicas),
        status=status,
        gates=_gates(observed.pods, members),
        restarts=restarts,
        # The names are reserved before the first member gets requests.
        reserve=observed.unreserved if members and not spec.deleting else (),
        events=(
            *_ring_events(published.members, members),
            *_scaling_events(spec, observed, replicas),
            *_drain_events(spec, observed, replicas, restarts, now_s),
            *_condition_events(published.conditions, status.conditions),
        ),
        requeue_after_s=_requeue_after_s(observed, status, now_s),
        finished=spec.deleting and _gone(observed, spec.drain_timeout_s, now_s),
    )


def plan_refused(observed: Observed, generation: int, error: str, now_s: float) -> Plan:
    """Return the plan for a pool with an unreadable spec: report the error and keep the children unchanged.

    Members without a pod still leave the ring. If the pool is being deleted, all members drain.
    """
    published = observed.published
    members = ring.surviving(published.members, observed.pods, leaving=observed.deleting, now_s=now_s)
    after = refused(observed, generation, error, now_s)
    status = PoolStatus(
        observed_generation=generation,
        replicas=published.replicas,
        ready_replicas=published.ready_replicas,
        in_ring=sum(member.state is MemberState.ACTIVE for member in members),
        selector=published.selector,
        ring_version=_version(observed, members),
        members=members,
        traffic=observed.traffic,
        conditions=after,
    )
    return Plan(
        status=status,
        events=(*_ring_events(published.members, members), *_condition_events(published.conditions, after)),
        requeue_after_s=_requeue_after_s(observed, status, now_s),
        finished=observed.deleting and _gone(observed, DRAIN_TIMEOUT_S, now_s),
    )


def _version(observed: Observed, members: Sequence[RingMember]) -> int:
    """Return the ring's version with ``members``; it never decreases, even after a manual edit of the status."""
    published = observed.published
    return ring.version_after(max(published.ring_version, observed.version_floor), published.members, members)


def _leaving(spec: PoolSpec, observed: Observed, replacing: ObservedPod | None) -> Collection[str]:
    """Return the pods to drain: every pod of a deleted pool; else pods beyond spec.replicas and one outdated pod."""
    if spec.deleting:
        return {pod.name for pod in observed.pods}
    leaving = set() if _must_wait(spec, observed) else {pod.name for pod in _victims(spec, observed.pods)}
    if replacing is not None:
        leaving.add(replacing.name)
    return leaving


def _invalid_notices(pods: Iterable[ObservedPod]) -> Iterable[str]:
    """Yield a warning for each pod whose notice cannot be read, which is then ignored."""
    for pod in pods:
        if pod.invalid_leave_at:
            value = repr(pod.invalid_leave_at[:_VALUE_SHOWN])
            yield f"Pod {pod.name}: annotation {LEAVE_AT} is {value}; give {TIME_ACCEPTED}"


def _victims(spec: PoolSpec, pods: Iterable[ObservedPod]) -> tuple[ObservedPod, ...]:
    """Return the pods beyond spec.replicas: a StatefulSet removes the highest ordinals first."""
    if not isinstance(spec.workload, TemplateWorkload):
        return ()
    return tuple(pod for pod in pods if pod.ordinal is not None and pod.ordinal >= spec.replicas)


def _must_wait(spec: PoolSpec, observed: Observed) -> bool:
    """Return whether the scale-down must wait: only the pods to remove receive requests now."""
    victims = {pod.name for pod in _victims(spec, observed.pods)}
    serving = {pod.name for pod in observed.pods if pod.serving and not pod.terminating}
    in_ring = {member.id: member.state for member in observed.published.members if member.id in serving}
    survivors = [each for each, state in in_ring.items() if each not in victims and state is not MemberState.DRAINING]
    return spec.replicas > 0 and not spec.deleting and not survivors and not victims.isdisjoint(in_ring)


def _replicas(spec: PoolSpec, observed: Observed, now_s: float) -> int:
    """Return the size for the StatefulSet: it shrinks only after every pod to remove has drained."""
    staying = [pod for pod in _victims(spec, observed.pods) if not _may_go(spec, observed, pod, now_s)]
    if not staying:
        return spec.replicas
    # A deleted StatefulSet has no size, but its pods may still run and have requests.
    size = 0 if observed.statefulset is None else observed.statefulset.replicas
    return max(spec.replicas, size, *((pod.ordinal or 0) + 1 for pod in staying))


def _may_go(spec: PoolSpec, observed: Observed, pod: ObservedPod, now_s: float) -> bool:
    """Return whether a pod may be deleted: it is not in the published ring, or its drain is over."""
    member = next((each for each in observed.published.members if each.id == pod.name), None)
    if member is None:
        return True
    return _is_over(member, observed, spec.drain_timeout_s, now_s)


def _is_over(member: RingMember, observed: Observed, drain_timeout_s: float, now_s: float) -> bool:
    """Return whether a member's drain is over: it has drained, or drain.timeout has passed."""
    return member.state is MemberState.DRAINING and (
        drain.drained(member, observed) or drain.overdue(member, drain_timeout_s, now_s)
    )


def _restarts(spec: PoolSpec, observed: Observed, replacing: ObservedPod | None, now_s: float) -> tuple[Restart, ...]:
    if replacing is None or not _may_go(spec, observed, replacing, now_s):
        return ()
    return (Restart(pod=replacing.name, uid=replacing.uid),)


def _gone(observed: Observed, drain_timeout_s: float, now_s: float) -> bool:
    """Return whether a pool that is being deleted has drained: the drain of every published member is over."""
    return all(_is_over(member, observed, drain_timeout_s, now_s) for member in observed.published.members)


def _gates(pods: Iterable[ObservedPod], members: Iterable[RingMember]) -> tuple[Gate, ...]:
    """Return the readiness gates to change: a gate is true while the pod is Joining or Active."""
    states = {member.id: member.state for member in members}
    gates = []
    for pod in pods:
        state = states.get(pod.name)
        wanted = state in (MemberState.JOINING, MemberState.ACTIVE)
        if pod.in_ring is not None and pod.in_ring != wanted:
            gates.append(Gate(pod=pod.name, uid=pod.uid, in_ring=wanted, reason=state.value if state else "NotInRing"))
    return tuple(gates)


def _requeue_after_s(observed: Observed, status: PoolStatus, now_s: float) -> float:
    due_s = [REST_INTERVAL_S]
    if any(member.state is MemberState.DRAINING for member in status.members):
        due_s.append(DRAIN_INTERVAL_S)
    if status.ring_version != observed.published.ring_version or any(
        each.type == ConditionType.RING_SYNCED and each.status is False for each in status.conditions
    ):
        due_s.append(SYNC_INTERVAL_S)
    changes = (ring.next_change_s(status.members, observed.pods, now_s), no_member_due_s(observed, now_s))
    return min(*due_s, *(each for each in changes if each is not None), REST_INTERVAL_S)


def _ring_events(before: Sequence[RingMember], after: Sequence[RingMember]) -> Iterable[Event]:
    """Yield one Event for each kind of change, for any number of changed members."""
    was, now = ({member.id: member.state for member in members} for members in (before, after))
    changed = {member: state for member, state in now.items() if was.get(member) is not state}
    back = [
        each for each, state in changed.items() if state is MemberState.ACTIVE and was.get(each) is MemberState.DRAINING
    ]
    draining = _in_state(changed, MemberState.DRAINING)
    noticed = {each.id: time_text(each.leave_at_s) for each in after if each.leave_at_s is not None}
    kinds = (
        (EventReason.MEMBER_JOINING, "joined the ring with a rising weight", _in_state(changed, MemberState.JOINING)),
        (EventReason.DRAIN_CANCELLED, "drain cancelled, active again", back),
        (
            EventReason.MEMBER_ACTIVE,
            "active in the ring",
            [each for each in _in_state(changed, MemberState.ACTIVE) if each not in back],
        ),
        (
            EventReason.MEMBER_DRAINING,
            "draining, receives no new requests",
            [each for each in draining if each not in noticed],
        ),
        (
            EventReason.MEMBER_DRAINING,
            "draining, because the pod must stop at this time",
            [f"{each} ({noticed[each]})" for each in draining if each in noticed],
        ),
        (EventReason.MEMBER_LEFT, "left the ring", [each for each in was if each not in now]),
    )
    for reason, what, names in kinds:
        if names:
            yield Event(reason=reason, message=f"{named(names)}: {what}")


def _in_state(states: dict[str, MemberState], state: MemberState) -> list[str]:
    return [member for member, has in states.items() if has is state]


def _scaling_events(spec: PoolSpec, observed: Observed, replicas: int) -> Iterable[Event]:
    if spec.deleting or observed.statefulset is None or not isinstance(spec.workload, TemplateWorkload):
        return
    before = observed.statefulset.replicas
    if replicas != before:
        reason = EventReason.SCALED_UP if replicas > before else EventReason.SCALED_DOWN
        yield Event(reason=reason, message=f"Scaled StatefulSet from {before} to {replicas} replicas")


def _drain_events(
    spec: PoolSpec, observed: Observed, replicas: int, restarts: Sequence[Restart], now_s: float
) -> Iterable[Event]:
    """Yield the Events for drains that timed out and for replaced pods."""
    going = {each.pod for each in restarts}
    if observed.statefulset is not None and replicas < observed.statefulset.replicas:
        going |= {pod.name for pod in _victims(spec, observed.pods)}
    late = [
        member.id
        for member in drain.draining(observed.published)
        if member.id in going
        and not drain.drained(member, observed)
        and drain.overdue(member, spec.drain_timeout_s, now_s)
    ]
    if late:
        message = f"{named(late)}: removed after {spec.drain_timeout_s:g} s, with requests in flight"
        yield Event(reason=EventReason.DRAIN_TIMED_OUT, message=message, warning=True)
    for restart in restarts:
        yield Event(
            reason=EventReason.ROLLING_POD, message=f"{restart.pod}: deleted, because the pod has an outdated template"
        )


def _condition_events(before: Sequence[Condition], after: Sequence[Condition]) -> Iterable[Event]:
    """Yield the Events for changed conditions."""
    was, now = ({each.type: each for each in some} for some in (before, after))
    accepted, earlier = now.get(ConditionType.ACCEPTED), was.get(ConditionType.ACCEPTED)
    if accepted is not None and (
        earlier is None or (accepted.reason, accepted.message) != (earlier.reason, earlier.message)
    ):
        if accepted.reason == "PrefillPoolUnusable":
            yield Event(reason=EventReason.PREFILL_POOL_UNUSABLE, message=accepted.message, warning=True)
        elif accepted.status is False:
            yield Event(reason=EventReason.INVALID_SPEC, message=accepted.message, warning=True)
        elif accepted.reason == "ModelConflict":
            yield Event(reason=EventReason.MODEL_CONFLICT, message=accepted.message, warning=True)
        elif accepted.reason == "AcceptedWithWarnings":
            yield Event(reason=EventReason.TEMPLATE_WARNING, message=accepted.message, warning=True)
        elif earlier is None or earlier.status is False or earlier.reason == "ModelConflict":
            yield Event(reason=EventReason.ACCEPTED, message=accepted.message)
    degraded, earlier = now.get(ConditionType.DEGRADED), was.get(ConditionType.DEGRADED)
    available = ConditionType.AVAILABLE in now and now[ConditionType.AVAILABLE].status
    if degraded is not None and degraded.status and (earlier is None or not earlier.status):
        yield Event(reason=EventReason.POOL_DEGRADED, message=degraded.message, warning=True)
    elif degraded is not None and not degraded.status and earlier is not None and earlier.status and available:
        yield Event(reason=EventReason.POOL_RECOVERED, message=degraded.message)
