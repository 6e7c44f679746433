"""What the pool's conditions say: one small function for each type, all pure (CONTRACT "Status").

A message names pods and routers but never counts what changes by itself, so that nothing is written at rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.pools.claims import LostClaim
from dualmap.pools.pool import MemberState
from dualmap_operator.decide import drain, rollout
from dualmap_operator.decide.observed import Condition, Observed, RingMember
from dualmap_operator.decide.spec import PoolSpec, SelectorWorkload, TemplateWorkload
from dualmap_operator.names import ConditionType

# How long a pool may be without a ready member before that is said to be wrong; one that starts needs a while.
NO_MEMBER_GRACE_S: Final = 30.0
# Models take minutes to load.
UNREADY_GRACE_S: Final = 300.0
# A router takes over a ring within milliseconds: one that is behind just after a change is not worth two writes.
SYNC_GRACE_S: Final = 5.0
_NAMES_SHOWN: Final = 10
_NAME_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class _Finding:
    status: bool | None
    reason: str
    message: str


def conditions(
    spec: PoolSpec,
    observed: Observed,
    members: Sequence[RingMember],
    warnings: Sequence[str],
    now_s: float,
    *,
    waits_for_survivors: bool,
) -> tuple[Condition, ...]:
    """Return every condition of a pool whose ring will have ``members``.

    ``waits_for_survivors`` is whether a scale-down waits until one of those that stay takes requests.
    """
    findings = {
        ConditionType.ACCEPTED: _accepted(observed.lost_claims, warnings),
        ConditionType.AVAILABLE: _available(spec, members),
        ConditionType.RING_SYNCED: _ring_synced(observed, now_s),
        ConditionType.PROGRESSING: _progressing(spec, observed, members),
        ConditionType.DRAINING: _draining(spec, members),
        ConditionType.SCALING_LIMITED: _scaling_limited(spec, waits_for_survivors),
        ConditionType.DEGRADED: _degraded(spec, observed, members, now_s),
    }
    return tuple(_condition(spec.generation, observed, type_, finding, now_s) for type_, finding in findings.items())


def refused(observed: Observed, generation: int, error: str, now_s: float) -> tuple[Condition, ...]:
    """Return the conditions of a pool whose spec cannot be used: Accepted is False, the others stay."""
    accepted = _condition(generation, observed, ConditionType.ACCEPTED, _Finding(False, "InvalidSpec", error), now_s)
    return (accepted, *(each for each in observed.published.conditions if each.type != ConditionType.ACCEPTED))


def no_member_due_s(observed: Observed, now_s: float) -> float | None:
    """Return in how many seconds a pool without members becomes Degraded by the passing of time."""
    since_s = _unavailable_since_s(observed)
    due_s = None if since_s is None else since_s + NO_MEMBER_GRACE_S - now_s
    return due_s if due_s is not None and due_s > 0 else None


def named(names: Iterable[str]) -> str:
    """Return names for a sentence, the first few of many."""
    listed = list(names)
    more = len(listed) - _NAMES_SHOWN
    shown = ", ".join(listed[:_NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _condition(generation: int, observed: Observed, type_: str, finding: _Finding, now_s: float) -> Condition:
    before = next((each for each in observed.published.conditions if each.type == type_), None)
    return Condition(
        type=type_,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        since_s=before.since_s if before is not None and before.status == finding.status else now_s,
        observed_generation=generation,
    )


def _accepted(lost: Sequence[LostClaim], warnings: Sequence[str]) -> _Finding:
    if lost:
        names_of: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for each in lost:
            names_of[each.owner][_quoted(each.name)] = None
        told = [f"requests for {named(names)} go to the older pool {owner}" for owner, names in names_of.items()]
        return _Finding(True, "ModelConflict", "; ".join((*told, *warnings)))
    if warnings:
        return _Finding(True, "AcceptedWithWarnings", "; ".join(warnings))
    return _Finding(True, "Accepted", "the spec is in use")


def _quoted(name: str) -> str:
    """Return a model name for a sentence: users may choose any, of up to 253 characters."""
    quoted = repr(name)
    return quoted if len(quoted) <= _NAME_CHARACTERS else f"{quoted[: _NAME_CHARACTERS - 3]}..."


def _available(spec: PoolSpec, members: Sequence[RingMember]) -> _Finding:
    taking = [member for member in members if member.state is not MemberState.DRAINING]
    if taking:
        return _Finding(True, "MembersReady", "at least one member takes requests")
    if spec.deleting:
        return _Finding(False, "Deleting", "the pool is being deleted")
    if _wants_none(spec):
        return _Finding(False, "ScaledToZero", "spec.replicas is 0")
    return _Finding(False, "NoReadyMember", "no pod of the pool is ready")


def _ring_synced(observed: Observed, now_s: float) -> _Finding:
    ready = [router for router in observed.routers if router.ready]
    if not ready:
        return _Finding(None, "NoRouters", "no ready router is known")
    silent = sorted(router.router for router in ready if not router.heard)
    version = observed.published.ring_version
    behind = sorted(
        router.router
        for router in ready
        if router.heard and (drain.behind(router, version) or (version and not router.ring_version))
    )
    if silent:
        return _Finding(False, "RoutersSilent", f"no answer from {named(silent)}")
    changed_s = max((member.since_s for member in observed.published.members), default=0.0)
    if behind and now_s - changed_s >= SYNC_GRACE_S:
        return _Finding(False, "RoutersBehind", f"an older ring, or none, is in use at {named(behind)}")
    return _Finding(True, "RoutersAgree", "every ready router has applied the ring")


def _progressing(spec: PoolSpec, observed: Observed, members: Sequence[RingMember]) -> _Finding:
    if spec.deleting:
        return _Finding(True, "Deleting", "the pool is let go when its members have drained")
    outdated = rollout.outdated(spec, observed)
    if outdated:
        return _Finding(True, "RollingOut", f"of an older template: {named(pod.name for pod in outdated)}")
    states = {member.id: member.state for member in members}
    joining = sorted(member for member, state in states.items() if state is MemberState.JOINING)
    if isinstance(spec.workload, TemplateWorkload) and len(observed.pods) != spec.replicas:
        return _Finding(True, "Scaling", f"to {spec.replicas} replicas")
    if joining:
        return _Finding(True, "Joining", f"taking over keys by and by: {named(joining)}")
    outside = sorted(pod.name for pod in observed.pods if pod.name not in states)
    if outside:
        return _Finding(True, "WaitingForPods", f"not ready: {named(outside)}")
    return _Finding(False, "Settled", "the ring is as the spec wants it")


def _draining(spec: PoolSpec, members: Sequence[RingMember]) -> _Finding:
    leaving = [member.id for member in members if member.state is MemberState.DRAINING]
    if not leaving:
        return _Finding(False, "NothingDrains", "no member is leaving")
    return _Finding(
        True,
        "WaitingForRequests",
        f"{named(leaving)}: until no request is in flight there, for {spec.drain_timeout_s:g} s at most",
    )


def _scaling_limited(spec: PoolSpec, waits_for_survivors: bool) -> _Finding:
    if isinstance(spec.workload, SelectorWorkload):
        return _Finding(True, "OwnedByWorkload", "the pods' own workload scales them; spec.replicas has no effect")
    if waits_for_survivors:
        return _Finding(True, "SurvivorsNotReady", "nobody drains until one of the pods that stay takes requests")
    return _Finding(False, "NotLimited", "spec.replicas sets the number of pods")


def _degraded(spec: PoolSpec, observed: Observed, members: Sequence[RingMember], now_s: float) -> _Finding:
    if observed.failures:
        return _Finding(True, "ApplyFailed", "; ".join(observed.failures))
    taking = any(member.state is not MemberState.DRAINING for member in members)
    if not taking and not _wants_none(spec) and not spec.deleting:
        since_s = _unavailable_since_s(observed)
        lost = any(member.state is not MemberState.DRAINING for member in observed.published.members)
        known = any(each.type == ConditionType.DEGRADED and each.status for each in observed.published.conditions)
        if lost or known or (since_s is not None and now_s - since_s >= NO_MEMBER_GRACE_S):
            return _Finding(True, "NoReadyMember", "no pod of the pool is ready: requests are answered 503")
    unready = sorted(
        pod.name
        for pod in observed.pods
        if not pod.serving and not pod.terminating and now_s - pod.serving_since_s >= UNREADY_GRACE_S
    )
    if unready:
        return _Finding(True, "PodsNotReady", f"not ready for {UNREADY_GRACE_S / 60:g} minutes: {named(unready)}")
    return _Finding(False, "AsExpected", "nothing is wrong")


def _unavailable_since_s(observed: Observed) -> float | None:
    """Return since when nobody takes requests though somebody should; pods wanted or made only now have their time."""
    published = {each.type: each for each in observed.published.conditions}
    available, progressing = (published.get(each) for each in (ConditionType.AVAILABLE, ConditionType.PROGRESSING))
    if available is None or available.status is not False or progressing is None or not progressing.status:
        return None
    oldest_pod_s = min((pod.serving_since_s for pod in observed.pods), default=0.0)
    return max(available.since_s, progressing.since_s, oldest_pod_s)


def _wants_none(spec: PoolSpec) -> bool:
    return isinstance(spec.workload, TemplateWorkload) and spec.replicas == 0
