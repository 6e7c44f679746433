"""Tests of the planned status: conditions, counts, Events, and no change without new observations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.objects.times import read_time
from dualmap.pools.claims import LostClaim
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import Engine, MemberState, Tokenizer, TokenSource
from dualmap_operator.decide.observed import Condition, Observed, RouterReport, TokenizerReport
from dualmap_operator.decide.plan import plan, plan_refused
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.decide.pod_reading import read_pod
from dualmap_operator.decide.spec import TemplateWorkload
from dualmap_operator.names import EventReason
from scenario import NOW_S, adopted, member, pod, router, seen, selector_spec, starting, template_spec

RECORDED = Path(__file__).parent / "recorded"
PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)


def condition(of: Plan, type_: str) -> Condition:
    (found,) = (each for each in of.status.conditions if each.type == type_)
    return found


def after(made: Plan, observed: Observed) -> Observed:
    """Return the observations after the watch has delivered the plan's writes."""
    return replace(observed, published=made.status)


def test_second_reconcile_of_idle_pool_changes_no_condition() -> None:
    observed = seen(PODS, ACTIVE, routers=[router()])
    first = plan(template_spec(), observed, NOW_S)
    second = plan(template_spec(), after(first, observed), NOW_S + 3600)
    assert second.status == first.status
    assert second.events == ()
    assert second.requeue_after_s == 30
    told = {each.type: each.status for each in first.status.conditions}
    assert told == {
        "Accepted": True, "Available": True, "RingSynced": True, "Progressing": False, "Draining": False,
        "ScalingLimited": False, "Degraded": False,
    }  # fmt: skip


def test_conditions_keep_transition_time_while_status_is_equal() -> None:
    observed = seen(PODS, ACTIVE, routers=[router()])
    first = plan(template_spec(), observed, NOW_S)
    later = plan(template_spec(), after(first, observed), NOW_S + 10)
    assert condition(later, "Available").since_s == NOW_S
    down = replace(after(later, observed), pods=tuple(starting(n) for n in range(3)))
    turned = plan(template_spec(), down, NOW_S + 20)
    assert condition(turned, "Available").since_s == NOW_S + 20


def test_status_counts_members_by_state() -> None:
    pods = (*PODS, starting(3))
    members = (
        *ACTIVE[:1],
        member(PODS[1], MemberState.JOINING, age_s=1, weight=25),
        member(PODS[2], MemberState.DRAINING),
    )
    status = plan(template_spec(4), seen(pods, members, size=4), NOW_S).status
    assert (status.replicas, status.ready_replicas, status.in_ring) == (4, 3, 2)
    assert status.selector == "serving.dualmap.dev/pool=qwen"
    assert status.observed_generation == 1


@pytest.mark.parametrize(
    ("routers", "status", "reason"),
    [
        ([], None, "NoRouters"),
        ([router(ready=False)], None, "NoRouters"),
        ([router()], True, "RoutersAgree"),
        ([router(), router("b", version=4)], False, "RoutersBehind"),
        ([router(), router("b", answered=False)], False, "RoutersSilent"),
        ([router(), router("b", version=4, ready=False)], True, "RoutersAgree"),
        ([router(), router("b", version=0)], False, "RoutersBehind"),
    ],
)
def test_ring_synced_requires_every_ready_router(routers: list, status: bool | None, reason: str) -> None:  # type: ignore[type-arg]
    said = condition(plan(template_spec(), seen(PODS, ACTIVE, routers=routers), NOW_S), "RingSynced")
    assert (said.status, said.reason) == (status, reason)


def test_degraded_is_false_during_grace_period_of_new_pool() -> None:
    pods = tuple(starting(n, serving_since_s=NOW_S) for n in range(3))
    observed = seen(pods, version=0)
    first = plan(template_spec(), observed, NOW_S)
    assert (condition(first, "Available").status, condition(first, "Degraded").status) == (False, False)
    waited = plan(template_spec(), after(first, observed), NOW_S + first.requeue_after_s)
    assert first.requeue_after_s <= 30
    assert condition(waited, "Degraded").reason == "NoReadyMember"
    assert EventReason.POOL_DEGRADED in {event.reason for event in waited.events}


def test_degraded_is_false_with_zero_replicas() -> None:
    observed = seen((), size=0, version=0)
    made = plan(template_spec(0), observed, NOW_S)
    later = plan(template_spec(0), after(made, observed), NOW_S + 600)
    assert condition(later, "Available").reason == "ScaledToZero"
    assert condition(later, "Degraded").status is False
    assert later.status == made.status


def test_degraded_is_false_during_grace_after_scale_from_zero() -> None:
    empty = seen((), size=0, version=0)
    slept = after(plan(template_spec(0), empty, NOW_S), empty)
    wanted = plan(template_spec(1), slept, NOW_S + 600)
    assert condition(wanted, "Degraded").status is False
    woken = replace(after(wanted, slept), pods=(starting(0, serving_since_s=NOW_S + 600),))
    made = plan(template_spec(1), woken, NOW_S + 601)
    again = plan(template_spec(1), after(made, woken), NOW_S + 602)
    assert condition(again, "Degraded").status is False
    assert condition(plan(template_spec(1), after(again, woken), NOW_S + 640), "Degraded").status is True


def test_deleted_pool_conditions_have_reason_deleting() -> None:
    members = tuple(member(each, MemberState.DRAINING, age_s=5) for each in PODS)
    made = plan(template_spec(deleting=True), seen(PODS, members, routers=[router()]), NOW_S)
    told = {each.type: each.reason for each in made.status.conditions}
    assert (told["Available"], told["Progressing"]) == ("Deleting", "Deleting")


def test_degraded_message_contains_the_apply_failure() -> None:
    observed = replace(seen(PODS, ACTIVE), failures=("StatefulSet llm/qwen: exceeded quota",))
    made = plan(template_spec(), observed, NOW_S)
    assert (condition(made, "Degraded").reason, condition(made, "Degraded").message) == (
        "ApplyFailed",
        "StatefulSet llm/qwen: exceeded quota",
    )


def test_scaling_limited_is_true_for_adopted_pods() -> None:
    made = plan(selector_spec(), seen((adopted("a"),), [member(adopted("a"))], size=None), NOW_S)
    limited = condition(made, "ScalingLimited")
    assert limited.status is True
    assert "spec.replicas has no effect" in limited.message
    assert made.status.selector == "app=vllm"


def test_invalid_spec_keeps_ring_and_reports_the_error() -> None:
    observed = seen(PODS, ACTIVE, routers=[router()])
    before = after(plan(template_spec(), observed, NOW_S), observed)
    made = plan_refused(before, 7, "spec.slo.ttft: 'soon' is not accepted", NOW_S + 5)
    assert made.status.members == ACTIVE
    assert (made.status.ring_version, made.status.observed_generation) == (5, 7)
    assert (condition(made, "Accepted").status, condition(made, "Accepted").reason) == (False, "InvalidSpec")
    assert condition(made, "Available").status is True
    assert [event.reason for event in made.events] == [EventReason.INVALID_SPEC]
    again = plan_refused(after(made, before), 7, "spec.slo.ttft: 'soon' is not accepted", NOW_S + 9)
    assert (again.status, again.events) == (made.status, ())


def test_degraded_is_true_if_pod_stays_unscheduled_after_grace() -> None:
    body = json.loads((RECORDED / "pod_pending.json").read_text())
    pending = replace(read_pod(body), name="qwen-2", ordinal=2)
    made_s = read_time(body["metadata"]["creationTimestamp"])
    assert made_s is not None
    observed = seen((*PODS[:2], pending), ACTIVE[:2], routers=[router()])
    fresh, old = (plan(template_spec(), observed, made_s + age_s) for age_s in (10, 400))
    assert condition(fresh, "Degraded").status is False
    assert condition(old, "Degraded").reason == "PodsNotReady"


def test_plan_ignores_ended_pods() -> None:
    evicted = adopted("b", 1, serving=False, ready=False, ended=True)
    made = plan(selector_spec(), seen((adopted("a"), evicted), [member(adopted("a"))], size=None), NOW_S)
    told = {each.type: each.status for each in made.status.conditions}
    assert (told["Progressing"], told["Degraded"], made.status.replicas) == (False, False, 1)


def test_ring_version_never_decreases_after_status_removal() -> None:
    wiped = replace(seen(PODS, version=0, routers=[]), version_floor=41)
    assert plan(template_spec(), wiped, NOW_S).status.ring_version == 42


class TestRefusedSpec:
    ERROR = "spec.slo.ttft: 'soon' is not accepted"

    def test_crashed_member_is_removed_despite_invalid_spec(self) -> None:
        observed = seen((*PODS[:2], starting(2)), ACTIVE)
        made = plan_refused(observed, 7, self.ERROR, NOW_S)
        assert {each.id for each in made.status.members} == {"qwen-0", "qwen-1"}
        assert made.status.ring_version == 6

    def test_invalid_spec_without_known_pods_keeps_members(self) -> None:
        assert plan_refused(seen((), ACTIVE), 7, self.ERROR, NOW_S).status.members == ACTIVE

    def test_deleted_pool_with_invalid_spec_drains_first(self) -> None:
        observed = replace(seen(PODS, ACTIVE, routers=[router()]), deleting=True)
        made = plan_refused(observed, 7, self.ERROR, NOW_S)
        assert {each.state for each in made.status.members} == {MemberState.DRAINING}
        assert not made.finished
        drained = replace(after(made, observed), idle_checks={each.name: 2 for each in PODS})
        assert plan_refused(drained, 7, self.ERROR, NOW_S).finished


class TestModelConflict:
    LOST = tuple(LostClaim(pool="llm/qwen", name=name, owner="llm/older") for name in ("Qwen/Qwen2.5-7B", "small"))
    ADOPTED = (adopted("a"), adopted("b", 1))
    SEEN = seen(ADOPTED, [member(each) for each in ADOPTED], size=None, routers=[router()])

    def test_model_conflict_is_reported_once_and_changes_only_condition(self) -> None:
        settled = after(plan(selector_spec(), self.SEEN, NOW_S), self.SEEN)
        lost = replace(settled, lost_claims=self.LOST)
        made = plan(selector_spec(), lost, NOW_S + 5)
        accepted = condition(made, "Accepted")
        assert (accepted.status, accepted.reason, accepted.since_s) == (True, "ModelConflict", NOW_S)
        assert accepted.message == "Requests with model 'Qwen/Qwen2.5-7B', 'small' go to the older pool llm/older"
        assert [(each.reason, each.message, each.warning) for each in made.events] == [
            (EventReason.MODEL_CONFLICT, accepted.message, True)
        ]
        assert replace(made.status, conditions=()) == replace(settled.published, conditions=())
        assert made.status.conditions[1:] == settled.published.conditions[1:]
        again = plan(selector_spec(), after(made, lost), NOW_S + 3600)
        assert (again.status, again.events, again.requeue_after_s) == (made.status, (), 30)

    def test_unusable_prefill_pool_is_reported_and_the_pool_serves_on(self) -> None:
        settled = after(plan(selector_spec(), self.SEEN, NOW_S), self.SEEN)
        unusable = replace(settled, prefill_problem="pool other has another model")
        made = plan(selector_spec(), unusable, NOW_S + 5)
        accepted = condition(made, "Accepted")
        assert (accepted.status, accepted.reason) == (False, "PrefillPoolUnusable")
        assert accepted.message.startswith("spec.prefillPool: pool other has another model")
        assert [each.reason for each in made.events] == [EventReason.PREFILL_POOL_UNUSABLE]
        assert replace(made.status, conditions=()) == replace(settled.published, conditions=())
        told = replace(after(made, unusable), prefill_problem="")
        assert [each.reason for each in plan(selector_spec(), told, NOW_S + 9).events] == [EventReason.ACCEPTED]

    def test_model_conflict_clears_after_the_name_is_released(self) -> None:
        lost = replace(self.SEEN, lost_claims=self.LOST)
        told = replace(after(plan(selector_spec(), lost, NOW_S), lost), lost_claims=())
        made = plan(selector_spec(), told, NOW_S + 5)
        assert condition(made, "Accepted").reason == "Accepted"
        assert [each.reason for each in made.events] == [EventReason.ACCEPTED]

    def test_model_conflict_message_names_each_pool_and_keeps_warnings(self) -> None:
        template = {"spec": {"containers": [{"name": "engine"}], "terminationGracePeriodSeconds": 1}}
        spec = replace(template_spec(), workload=TemplateWorkload(template=template))
        warned = condition(plan(spec, seen(PODS, ACTIVE), NOW_S), "Accepted")
        assert warned.reason == "AcceptedWithWarnings"
        lost = (*self.LOST[:1], LostClaim(pool="llm/qwen", name="small", owner="other/first"))
        said = condition(plan(spec, replace(seen(PODS, ACTIVE), lost_claims=lost), NOW_S), "Accepted")
        assert said.reason == "ModelConflict"
        assert said.message == (
            "Requests with model 'Qwen/Qwen2.5-7B' go to the older pool llm/older; "
            f"Requests with model 'small' go to the older pool other/first; {warned.message}"
        )

    def test_reserved_model_name_is_reported_with_its_namespace(self) -> None:
        lost = (LostClaim(pool="llm/qwen", name="small", owner="prod", reserved=True),)
        said = condition(plan(selector_spec(), replace(self.SEEN, lost_claims=lost), NOW_S), "Accepted")
        assert (said.status, said.reason) == (True, "ModelConflict")
        assert said.message == (
            "Requests with model 'small' go to namespace prod only (reserved in ConfigMap dualmap-models)"
        )

    def test_model_names_are_reserved_when_the_pool_has_members(self) -> None:
        unreserved = replace(self.SEEN, unreserved=("small",))
        assert plan(selector_spec(), unreserved, NOW_S).reserve == ("small",)
        assert plan(selector_spec(), replace(unreserved, pods=()), NOW_S).reserve == ()
        assert plan(replace(selector_spec(), deleting=True), unreserved, NOW_S).reserve == ()

    def test_longest_model_conflict_message_fits_the_status(self) -> None:
        lost = tuple(LostClaim(pool="llm/qwen", name="\x00" * 253, owner=f"{n:063}/{n:050}") for n in range(65))
        said = condition(plan(selector_spec(), replace(self.SEEN, lost_claims=lost), NOW_S), "Accepted")
        assert len(said.message) < 32_768 / 2, "what the CRD takes, and room for warnings"

    def test_model_conflict_with_invalid_spec_reports_invalid_spec(self) -> None:
        made = plan_refused(replace(self.SEEN, lost_claims=self.LOST), 7, "spec.slo.ttft: 'soon'", NOW_S)
        assert condition(made, "Accepted").reason == "InvalidSpec"


def test_thousand_member_changes_create_a_single_event() -> None:
    pods = tuple(pod(n, address=f"10.{n // 250}.0.{n % 250}") for n in range(1000))
    made = plan(template_spec(1000), seen(pods, size=1000, version=0), NOW_S)
    (event,) = (each for each in made.events if each.reason is EventReason.MEMBER_ACTIVE)
    assert "and 990 more" in event.message


FILES = replace(template_spec(), engine=Engine(tokenizer=Tokenizer(source=TokenSource.FILES, path="/tokenizers/qwen")))


def tokens_agree(*reports: RouterReport) -> Condition:
    return condition(plan(FILES, seen(PODS, ACTIVE, routers=reports), NOW_S), "TokensAgree")


def test_pool_with_a_tokenizer_has_tokens_agree() -> None:
    assert (tokens_agree(router()).status, tokens_agree(router()).reason) == (True, "CountsEqual")
    assert (tokens_agree().status, tokens_agree().reason) == (None, "NoRouters")


def test_differing_counts_make_tokens_agree_false() -> None:
    first = router("a", tokenizer=TokenizerReport(differing=("'m' (chat)",)))
    second = router("b", tokenizer=TokenizerReport(differing=("'m' (chat)", "'m' (chat with tools)")))
    found = tokens_agree(first, second)
    assert (found.status, found.reason) == (False, "CountsDiffer")
    assert found.message.endswith(": 'm' (chat with tools), 'm' (chat).")


def test_unusable_tokenizer_makes_tokens_agree_false() -> None:
    unusable = TokenizerReport(problem="/tokenizers/qwen/tokenizer.json: No such file", differing=("'m' (chat)",))
    found = tokens_agree(router("b", tokenizer=unusable), router("a", tokenizer=unusable))
    assert (found.status, found.reason) == (False, "SourceUnusable")
    assert found.message.endswith("/tokenizers/qwen/tokenizer.json: No such file (a, b).")


def test_router_that_takes_no_requests_is_not_heard_about_tokens() -> None:
    unusable = TokenizerReport(problem="x")
    assert tokens_agree(router(), router("b", ready=False, tokenizer=unusable)).status is True


STORED = replace(FILES, kv_store=KvStore(type=StoreType.MOONCAKE, endpoint="http://master:9003"))


def kv_store_available(*reports: RouterReport) -> Condition:
    return condition(plan(STORED, seen(PODS, ACTIVE, routers=reports), NOW_S), "KvStoreAvailable")


def test_pool_with_a_kv_store_has_kv_store_available() -> None:
    assert (kv_store_available(router()).status, kv_store_available(router()).reason) == (True, "Asked")
    assert (kv_store_available().status, kv_store_available().reason) == (None, "NoRouters")
    without = plan(FILES, seen(PODS, ACTIVE, routers=[router(kv_store_problem="x")]), NOW_S)
    assert "KvStoreAvailable" not in {each.type for each in without.status.conditions}


def test_kv_store_that_routers_leave_alone_makes_kv_store_available_false() -> None:
    late = router("b", kv_store_problem="no answer within 5 ms")
    found = kv_store_available(router("a"), late, router("c", ready=False, kv_store_problem="x"))
    assert (found.status, found.reason) == (False, "LeftAlone")
    assert found.message == "Routers do not ask the KV store at http://master:9003: no answer within 5 ms (b)."
