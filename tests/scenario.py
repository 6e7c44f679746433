"""Scenarios for the operator's tests: observations before a reconcile, and a simulated cluster that executes plans.

``check`` rejects impossible scenarios, so that no test uses a state that cannot occur.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dualmap.objects.pods import IN_RING_GATE
from dualmap.objects.times import time_text
from dualmap.pools.pool import Engine, MemberState
from dualmap_operator.decide import drain
from dualmap_operator.decide.observed import (
    EndpointReport,
    Observed,
    ObservedPod,
    ObservedStatefulSet,
    PoolStatus,
    RingMember,
    RouterReport,
)
from dualmap_operator.decide.plan import REST_INTERVAL_S, plan
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.decide.pod_reading import read_pod
from dualmap_operator.decide.spec import PoolSpec, SelectorWorkload, TemplateWorkload

NOW_S = 1_800_000_000.0
TEMPLATE = {"spec": {"containers": [{"name": "engine", "image": "engine:1", "args": ["--shutdown-timeout=60"]}]}}
REVISION = "qwen-1"


class InconsistentScenarioError(AssertionError):
    """The scenario describes a state that an API server cannot have."""


def template_spec(replicas: int = 3, *, generation: int = 1, drain_timeout_s: float = 600.0, **more: bool) -> PoolSpec:
    return PoolSpec(
        namespace="llm",
        name="qwen",
        uid="pool-uid",
        generation=generation,
        engine=Engine(),
        replicas=replicas,
        workload=TemplateWorkload(template=TEMPLATE),
        drain_timeout_s=drain_timeout_s,
        **more,
    )


def selector_spec(**more: bool) -> PoolSpec:
    workload = SelectorWorkload(selector={"matchLabels": {"app": "vllm"}})
    return replace(template_spec(1, **more), workload=workload)


def pod(number: int, **changes: object) -> ObservedPod:
    """Return a pod of the StatefulSet that has been serving in the ring for a long time."""
    made = ObservedPod(
        name=f"qwen-{number}",
        uid=f"uid-{number}",
        address=f"10.0.0.{number + 1}",
        serving=True,
        serving_since_s=NOW_S - 3600,
        ready=True,
        in_ring=True,
        incarnation=f"uid-{number}-0",
        ordinal=number,
        revision=REVISION,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # tests name the fields they mean


def adopted(name: str, number: int = 0, **changes: object) -> ObservedPod:
    return replace(pod(number, **changes), name=name, in_ring=None, ordinal=None, revision="")


def starting(number: int, **changes: object) -> ObservedPod:
    """Return a pod that has an address and does not serve yet."""
    return pod(number, **{"serving": False, "ready": False, "in_ring": False, **changes})


def member(
    of: ObservedPod, state: MemberState = MemberState.ACTIVE, *, age_s: float = 3600.0, weight: int = 100
) -> RingMember:
    return RingMember(
        id=of.name,
        address=of.address,
        port=8000,
        state=state,
        weight=weight,
        since_s=NOW_S - age_s,
        incarnation=of.incarnation,
    )


def router(
    name: str = "router-a",
    *,
    version: int = 5,
    busy: Mapping[str, int] | None = None,
    state: str = "Draining",
    **more: Any,
) -> RouterReport:
    """Return a router's report about the pool.

    ``state`` is the router's state of qwen-2 and of the ``busy`` members.
    """
    in_flight = {"qwen-2": 0, **(busy or {})} if version else {}
    endpoints = {each: EndpointReport(in_flight=count, state=state) for each, count in in_flight.items()}
    return RouterReport(router=name, ring_version=version, endpoints=endpoints, **more)


def seen(
    pods: Sequence[ObservedPod],
    members: Sequence[RingMember] = (),
    *,
    size: int | None = 3,
    version: int = 5,
    routers: Sequence[RouterReport] = (),
    engines: Mapping[str, int | None] | None = None,
    idle_checks: Mapping[str, int] | None = None,
    revision: str = REVISION,
) -> Observed:
    """Return the observations; raise InconsistentScenarioError for an impossible scenario."""
    observed = Observed(
        published=PoolStatus(ring_version=version, members=tuple(members)),
        statefulset=None if size is None else ObservedStatefulSet(replicas=size, update_revision=revision),
        pods=tuple(pods),
        routers=tuple(routers),
        engine_requests=engines or {},
        idle_checks=idle_checks or {},
    )
    check(observed)
    return observed


def check(observed: Observed) -> None:
    """Raise InconsistentScenarioError for an impossible scenario."""
    names = [each.name for each in observed.pods]
    wrong = []
    if len(set(names)) < len(names):
        wrong.append("two pods of one name")
    if any(each.ready and not each.serving for each in observed.pods):
        wrong.append("a pod is Ready whose containers are not")
    if any(each.ready and each.in_ring is False for each in observed.pods):
        wrong.append("a pod is Ready whose readiness gate is false")
    if any(each.serving and not each.address for each in observed.pods):
        wrong.append("a pod serves without an address")
    if any(each.in_ring is not None and each.ordinal is None for each in observed.pods):
        wrong.append("an adopted pod has our readiness gate")
    ids = [each.id for each in observed.published.members]
    if len(set(ids)) < len(ids):
        wrong.append("two members of one id")
    if observed.published.members and observed.published.ring_version < 1:
        wrong.append("members in a ring that never had a version")
    draining = {each.id for each in drain.draining(observed.published)}
    if observed.idle_checks.keys() - draining:
        wrong.append("looks at members that do not drain")
    if any(report.ring_version > observed.published.ring_version for report in observed.routers):
        wrong.append("a router is ahead of the published ring")
    if wrong:
        raise InconsistentScenarioError("; ".join(wrong))


def states(of: Plan | Iterable[RingMember]) -> dict[str, str]:
    members = of.status.members if isinstance(of, Plan) else of
    return {each.id: each.state.value for each in members}


def size_asked(of: Plan) -> int | None:
    """Return the StatefulSet's size in a plan's children."""
    sizes = [child["spec"]["replicas"] for child in of.children if child["kind"] == "StatefulSet"]
    return sizes[0] if sizes else None


@dataclass(slots=True, kw_only=True)
class World:
    """A simulated cluster that executes plans: a StatefulSet controller, starting pods, and routers that follow the
    ring.

    ``busy`` is the number of requests in flight at each member; only the test ends requests. ``stranded`` are the pods
    with a closed readiness gate that look as if their node was lost.
    """

    spec: PoolSpec
    now_s: float = NOW_S
    published: PoolStatus = field(default_factory=PoolStatus)
    size: int | None = None
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    lives: int = 0
    idle_checks: dict[str, int] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    revision: str = REVISION
    kubelet_gives_reasons: bool = True
    stranded: set[str] = field(default_factory=set)

    def observed(self) -> Observed:
        report = router(version=self.published.ring_version, busy=self.busy)
        observed = Observed(
            published=self.published,
            statefulset=None
            if self.size is None
            else ObservedStatefulSet(replicas=self.size, update_revision=self.revision),
            pods=tuple(sorted(self.pods.values(), key=lambda each: each.name)),
            routers=(report,),
            engine_requests=dict(self.busy),
        )
        self.idle_checks = {
            each.id: self.idle_checks.get(each.id, 0) + 1 if drain.idle(each, observed) else 0
            for each in drain.draining(observed.published)
        }
        observed = replace(observed, idle_checks=self.idle_checks)
        check(observed)
        return observed

    def step(self, seconds: float = 1.0) -> Plan:
        """Advance the time, reconcile once, and execute the plan."""
        self.now_s += seconds
        made = plan(self.spec, self.observed(), self.now_s)
        self.plans.append(made)
        self.published = made.status
        for gate in made.gates:
            turned = self.pods[gate.pod]
            ready = gate.in_ring and turned.serving
            # The operator's own code reads the state of a pod with a closed gate and Ready false from an object.
            serving = turned.serving and (ready or read_pod(self._unready_body(turned)).serving)
            if turned.serving and not serving:
                self.stranded.add(gate.pod)
            self.pods[gate.pod] = replace(turned, in_ring=gate.in_ring, ready=ready, serving=serving)
        for restart in made.restarts:
            self.terminate(restart.pod)
        asked = size_asked(made)
        if asked is not None:
            self.size = asked
        self._statefulset()
        return made

    def settle(self, steps: int = 600) -> None:
        """Reconcile until a plan has no action and no wait."""
        for _ in range(steps):
            before = self.published
            if self.step().requeue_after_s == REST_INTERVAL_S and self.published == before:
                return

    def terminate(self, name: str) -> None:
        """Delete a pod, which no longer exists at the next reconcile."""
        self.pods.pop(name, None)
        self.busy.pop(name, None)
        self.stranded.discard(name)

    def crash(self, name: str) -> None:
        """Restart a pod's container in the same pod."""
        self.lives += 1
        self.busy.pop(name, None)
        self.pods[name] = replace(self.pods[name], serving=False, ready=False, incarnation=f"{name}-life-{self.lives}")

    def _unready_body(self, of: ObservedPod) -> dict[str, object]:
        """Return the API object's status of a serving pod with a newly closed readiness gate."""
        reason = {"reason": "ReadinessGatesNotReady"} if self.kubelet_gives_reasons else {}
        conditions = [
            {"type": "ContainersReady", "status": "True", "lastTransitionTime": time_text(of.serving_since_s)},
            {"type": IN_RING_GATE, "status": "False", "lastTransitionTime": time_text(self.now_s)},
            {"type": "Ready", "status": "False", "lastTransitionTime": time_text(self.now_s), **reason},
        ]
        return {
            "metadata": {"name": of.name, "uid": of.uid},
            "spec": {"readinessGates": [{"conditionType": IN_RING_GATE}]},
            "status": {"phase": "Running", "podIP": of.address, "conditions": conditions},
        }

    def _statefulset(self) -> None:
        for each in [each for each in self.pods.values() if self.size is not None and (each.ordinal or 0) >= self.size]:
            self.terminate(each.name)
        for name, each in self.pods.items():
            if not each.serving and name not in self.stranded:
                self.pods[name] = replace(each, serving=True, serving_since_s=self.now_s, ready=bool(each.in_ring))
        for number in range(self.size or 0):
            if f"qwen-{number}" not in self.pods:
                self.lives += 1
                fresh = starting(
                    number, uid=f"life-{self.lives}", incarnation=f"life-{self.lives}", revision=self.revision
                )
                self.pods[fresh.name] = fresh
