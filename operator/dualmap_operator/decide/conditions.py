"""The conditions in a pool's status: one function for each type, all pure.

A message contains names of pods and routers, but no counter or time that changes without an event. An idle pool
therefore causes no status writes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.objects.reservations import CONFIG_MAP
from dualmap.objects.times import time_text
from dualmap.pools.claims import LostClaim
from dualmap.pools.pool import MemberState, TokenSource
from dualmap_operator.decide import drain, rollout
from dualmap_operator.decide.observed import Condition, Observed, RingMember, RouterReport
from dualmap_operator.decide.spec import PoolSpec, SelectorWorkload, TemplateWorkload
from dualmap_operator.names import ConditionType

# A pool without a ready member becomes Degraded after this time: a starting pool needs some time.
NO_MEMBER_GRACE_S: Final = 30.0
# A pod that is unready for this time makes the pool Degraded: models take minutes to load.
UNREADY_GRACE_S: Final = 300.0
# Routers normally apply a ring within milliseconds. The RingSynced condition ignores shorter delays, which saves two
# status writes.
SYNC_GRACE_S: Final = 5.0
_NAMES_SHOWN: Final = 10
_NAME_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class _Finding:
    status: bool | None
    reason: str
    message: str


_NO_ROUTERS: Final = _Finding(None, "NoRouters", "No ready router answers the operator.")


def conditions(
    spec: PoolSpec,
    observed: Observed,
    members: Sequence[RingMember],
    warnings: Sequence[str],
    now_s: float,
    *,
    waits_for_survivors: bool,
) -> tuple[Condition, ...]:
    """Return all conditions of a pool; ``members`` are the members that the plan publishes.

    ``waits_for_survivors`` is true while a scale-down waits until one of the remaining pods receives requests.
    """
    findings = {
        ConditionType.ACCEPTED: _accepted(observed, warnings),
        ConditionType.AVAILABLE: _available(spec, members),
        ConditionType.RING_SYNCED: _ring_synced(observed, now_s),
        ConditionType.PROGRESSING: _progressing(spec, observed, members),
        ConditionType.DRAINING: _draining(spec, members),
        ConditionType.SCALING_LIMITED: _scaling_limited(spec, waits_for_survivors),
        ConditionType.DEGRADED: _degraded(spec, observed, members, now_s),
    }
    if spec.engine.tokenizer.source is not TokenSource.ESTIMATE:
        findings[ConditionType.TOKENS_AGREE] = _tokens_agree(observed)
    if spec.kv_store.is_used:
        findings[ConditionType.KV_STORE_AVAILABLE] = _kv_store_available(spec, observed)
    return tuple(_condition(spec.generation, observed, type_, finding, now_s) for type_, finding in findings.items())


def refused(observed: Observed, generation: int, error: str, now_s: float) -> tuple[Condition, ...]:
    """Return the conditions of a pool with an invalid spec: Accepted is False, all other conditions are unchanged."""
    accepted = _condition(generation, observed, ConditionType.ACCEPTED, _Finding(False, "InvalidSpec", error), now_s)
    return (accepted, *(each for each in observed.published.conditions if each.type != ConditionType.ACCEPTED))


def no_member_due_s(observed: Observed, now_s: float) -> float | None:
    """Return the seconds until a pool without members becomes Degraded; None if it does not become Degraded."""
    since_s = _unavailable_since_s(observed)
    due_s = None if since_s is None else since_s + NO_MEMBER_GRACE_S - now_s
    return due_s if due_s is not None and due_s > 0 else None


def named(names: Iterable[str]) -> str:
    """Return names for a message: at most 10 names, then the number of further names."""
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


def _accepted(observed: Observed, warnings: Sequence[str]) -> _Finding:
    lost = observed.lost_claims
    if observed.prefill_problem:
        message = f"spec.prefillPool: {observed.prefill_problem}, so the members of this pool prefill themselves"
        return _Finding(False, "PrefillPoolUnusable", "; ".join((message, *_conflicts(lost), *warnings)))
    if lost:
        return _Finding(True, "ModelConflict", "; ".join((*_conflicts(lost), *warnings)))
    if warnings:
        return _Finding(True, "AcceptedWithWarnings", "; ".join(warnings))
    return _Finding(True, "Accepted", "The spec is valid and in use.")


def _conflicts(lost: Sequence[LostClaim]) -> list[str]:
    """Return one sentence for each owner of names that the pool has lost."""
    names_of: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for each in lost:
        target = (
            f"namespace {each.owner} only (reserved in ConfigMap {CONFIG_MAP})"
            if each.reserved
            else f"the older pool {each.owner}"
        )
        names_of[target][_quoted(each.name)] = None
    return [f"Requests with model {named(names)} go to {target}" for target, names in names_of.items()]


def _quoted(name: str) -> str:
    """Return a shortened model name for a message: a model name has up to 253 characters."""
    quoted = repr(name)
    return quoted if len(quoted) <= _NAME_CHARACTERS else f"{quoted[: _NAME_CHARACTERS - 3]}..."


def _available(spec: PoolSpec, members: Sequence[RingMember]) -> _Finding:
    if any(member.accepts for member in members):
        return _Finding(True, "MembersReady", "At least one member accepts requests.")
    if spec.deleting:
        return _Finding(False, "Deleting", "The pool is being deleted.")
    if _is_scaled_to_zero(spec):
        return _Finding(False, "ScaledToZero", "spec.replicas is 0.")
    return _Finding(False, "NoReadyMember", "No pod of the pool is ready.")


def _ring_synced(observed: Observed, now_s: float) -> _Finding:
    ready = [router for router in observed.routers if router.ready]
    if not ready:
        return _Finding(None, "NoRouters", "The operator finds no ready router.")
    silent = sorted(router.router for router in ready if not router.answered)
    version = observed.published.ring_version
    behind = sorted(
        router.router
        for router in ready
        if router.answered and (drain.behind(router, version) or (version and not router.ring_version))
    )
    if silent:
        return _Finding(False, "RoutersSilent", f"These routers do not answer: {named(silent)}.")
    changed_s = max((member.since_s for member in observed.published.members), default=0.0)
    if behind and now_s - changed_s >= SYNC_GRACE_S:
        return _Finding(False, "RoutersBehind", f"These routers have not applied the published ring: {named(behind)}.")
    return _Finding(True, "RoutersAgree", "Every ready router has applied the published ring.")


def _progressing(spec: PoolSpec, observed: Observed, members: Sequence[RingMember]) -> _Finding:
    if spec.deleting:
        return _Finding(True, "Deleting", "The operator removes the finalizer after all members have drained.")
    outdated = rollout.outdated(spec, observed)
    if outdated:
        return _Finding(
            True, "RollingOut", f"These pods have an outdated template: {named(pod.name for pod in outdated)}."
        )
    states = {member.id: member.state for member in members}
    joining = sorted(member for member, state in states.items() if state is MemberState.JOINING)
    if isinstance(spec.workload, TemplateWorkload) and len(observed.pods) != spec.replicas:
        return _Finding(True, "Scaling", f"Scaling the StatefulSet to {spec.replicas} replicas.")
    if joining:
        return _Finding(True, "Joining", f"The ring weight of these members is rising: {named(joining)}.")
    outside = sorted(pod.name for pod in observed.pods if pod.name not in states)
    if outside:
        return _Finding(True, "WaitingForPods", f"These pods are not ready: {named(outside)}.")
    return _Finding(False, "Settled", "The ring matches the spec.")


def _draining(spec: PoolSpec, members: Sequence[RingMember]) -> _Finding:
    draining = [member for member in members if member.state is MemberState.DRAINING]
    if not draining:
        return _Finding(False, "NothingDrains", "No member is draining.")
    leaving = [member.id for member in draining if member.leave_at_s is None]
    noticed = [f"{each.id} at {time_text(each.leave_at_s)}" for each in draining if each.leave_at_s is not None]
    sentences = []
    if leaving:
        sentences.append(f"Waiting up to {spec.drain_timeout_s:g} s for the requests in flight at {named(leaving)}.")
    if noticed:
        sentences.append(f"These pods must stop: {named(noticed)}.")
    return _Finding(True, "WaitingForRequests" if leaving else "NoticeGiven", " ".join(sentences))


def _scaling_limited(spec: PoolSpec, waits_for_survivors: bool) -> _Finding:
    if isinstance(spec.workload, SelectorWorkload):
        return _Finding(
            True, "OwnedByWorkload", "The owner of the pods sets the number of pods; spec.replicas has no effect."
        )
    if waits_for_survivors:
        return _Finding(True, "SurvivorsNotReady", "The scale-down waits until a remaining pod accepts requests.")
    return _Finding(False, "NotLimited", "spec.replicas sets the number of pods.")


def _tokens_agree(observed: Observed) -> _Finding:
    answering = _answering(observed)
    if not answering:
        return _NO_ROUTERS
    problems = _joined((router.tokenizer.problem, router.router) for router in answering)
    if problems:
        return _Finding(False, "SourceUnusable", f"Routers cannot use spec.engine.tokenizer: {problems}.")
    differing = sorted({each for router in answering for each in router.tokenizer.differing})
    if differing:
        return _Finding(
            False,
            "CountsDiffer",
            f"Requests of these kinds are routed by bytes, because the engines count other tokens: {named(differing)}.",
        )
    return _Finding(True, "CountsEqual", "The engines count the tokens that the routers compute.")


def _kv_store_available(spec: PoolSpec, observed: Observed) -> _Finding:
    answering = _answering(observed)
    if not answering:
        return _NO_ROUTERS
    problems = _joined((router.kv_store_problem, router.router) for router in answering)
    if problems:
        return _Finding(False, "LeftAlone", f"Routers do not ask the KV store at {spec.kv_store.endpoint}: {problems}.")
    return _Finding(True, "Asked", "The routers ask the KV store.")


def _answering(observed: Observed) -> list[RouterReport]:
    return [router for router in observed.routers if router.ready and router.answered]


def _joined(problems: Iterable[tuple[str, str]]) -> str:
    """Return the problems of routers as one text, each with its routers; empty if there are none."""
    routers_of: defaultdict[str, list[str]] = defaultdict(list)
    for problem, router in problems:
        if problem:
            routers_of[problem].append(router)
    return "; ".join(f"{problem} ({named(sorted(routers))})" for problem, routers in sorted(routers_of.items()))


def _degraded(spec: PoolSpec, observed: Observed, members: Sequence[RingMember], now_s: float) -> _Finding:
    if observed.failures:
        return _Finding(True, "ApplyFailed", "; ".join(observed.failures))
    taking = any(member.accepts for member in members)
    if not taking and not _is_scaled_to_zero(spec) and not spec.deleting:
        since_s = _unavailable_since_s(observed)
        lost = any(member.accepts for member in observed.published.members)
        known = any(each.type == ConditionType.DEGRADED and each.status for each in observed.published.conditions)
        if lost or known or (since_s is not None and now_s - since_s >= NO_MEMBER_GRACE_S):
            return _Finding(True, "NoReadyMember", "No pod of the pool is ready; routers reject requests with 503.")
    unready = sorted(
        pod.name
        for pod in observed.pods
        if not pod.serving and not pod.terminating and now_s - pod.serving_since_s >= UNREADY_GRACE_S
    )
    if unready:
        return _Finding(
            True,
            "PodsNotReady",
            f"These pods have not been ready for {UNREADY_GRACE_S / 60:g} minutes: {named(unready)}.",
        )
    return _Finding(False, "AsExpected", "The pool works as expected.")


def _unavailable_since_s(observed: Observed) -> float | None:
    """Return the time since which the pool lacks a required member; None if no member is required.

    The returned time is not before the readiness change of the oldest pod, so that new pods have time to start.
    """
    published = {each.type: each for each in observed.published.conditions}
    available, progressing = (published.get(each) for each in (ConditionType.AVAILABLE, ConditionType.PROGRESSING))
    if available is None or available.status is not False or progressing is None or not progressing.status:
        return None
    oldest_pod_s = min((pod.serving_since_s for pod in observed.pods), default=0.0)
    return max(available.since_s, progressing.since_s, oldest_pod_s)


def _is_scaled_to_zero(spec: PoolSpec) -> bool:
    return isinstance(spec.workload, TemplateWorkload) and spec.replicas == 0
