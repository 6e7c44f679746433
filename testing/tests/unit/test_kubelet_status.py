"""The status that the kubelet publishes for a pod: phase, conditions and containers."""

from collections.abc import Mapping
from typing import Any

import pytest

from emulated_cluster.kubelet.containers.status import (
    ContainerView,
    Placement,
    Running,
    State,
    Terminated,
    Waiting,
    pod_status,
)
from kubelet_objects import pod

GATE = "example.com/in-ring"


def test_pod_is_ready_if_all_containers_and_gates_are_ready() -> None:
    gated = pod(readinessGates=[{"conditionType": GATE}])

    closed = ready(gated, view(ready=True))
    gated["status"] = {"conditions": [{"type": GATE, "status": "False"}]}
    still_closed = ready(gated, view(ready=True))
    gated["status"] = {"conditions": [{"type": GATE, "status": "True"}]}

    assert closed == ("True", "False", f"condition {GATE} does not exist")
    assert still_closed == ("True", "False", f"condition {GATE} is False")
    assert ready(gated, view(ready=True)) == ("True", "True", None)
    assert ready(gated, view(ready=False)) == ("False", "False", "containers with unready status: ['engine']")


def test_unchanged_condition_keeps_its_last_transition_time() -> None:
    some = pod()
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    some["status"] = pod_status(some, [view(ready=False)], where, now_s=1.0)

    times = {
        each["type"]: each["lastTransitionTime"]
        for each in pod_status(some, [view(ready=True)], where, now_s=2.0)["conditions"]
    }

    assert times["Initialized"] == "1970-01-01T00:00:01Z"
    assert times["Ready"] == times["ContainersReady"] == "1970-01-01T00:00:02Z"


@pytest.mark.parametrize(
    ("policy", "state", "terminating", "phase"),
    [
        ("Always", Waiting(reason="ContainerCreating"), False, "Pending"),
        ("Always", Running(started_s=0.0), False, "Running"),
        ("Always", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), False, "Running"),
        ("Always", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), True, "Succeeded"),
        ("Never", Terminated(exit_code=0, started_s=0.0, finished_s=1.0), False, "Succeeded"),
        ("Never", Terminated(exit_code=1, started_s=0.0, finished_s=1.0), False, "Failed"),
    ],
)
def test_pod_phase_is_derived_from_container_states(policy: str, state: State, terminating: bool, phase: str) -> None:
    some = pod(restartPolicy=policy)
    if terminating:
        some["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)

    over = terminating or policy == "Never"
    assert pod_status(some, [view(state=state, over=over)], where, now_s=2.0)["phase"] == phase


def test_pod_with_a_restarting_container_is_not_failed() -> None:
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    failed = Terminated(exit_code=1, started_s=0.0, finished_s=1.0)

    assert pod_status(pod(restartPolicy="OnFailure"), [view(state=failed)], where, now_s=2.0)["phase"] == "Running"


@pytest.mark.parametrize(
    ("exit_code", "over", "phase", "initialized"),
    [(0, True, "Running", "True"), (1, True, "Failed", "False"), (1, False, "Pending", "False")],
)
def test_pod_phase_depends_on_init_containers_first(exit_code: int, over: bool, phase: str, initialized: str) -> None:
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    initial = view(state=Terminated(exit_code=exit_code, started_s=0.0, finished_s=1.0), over=over)

    status = pod_status(pod(), [view()], where, now_s=2.0, init_containers=[initial])

    assert status["phase"] == phase
    assert {each["type"]: each["status"] for each in status["conditions"]}["Initialized"] == initialized
    assert status["initContainerStatuses"][0]["ready"] is (exit_code == 0)


def view(*, ready: bool = False, state: State | None = None, over: bool = False) -> ContainerView:
    return ContainerView(
        name="engine",
        image="",
        container_id="",
        state=Running(started_s=0.0) if state is None else state,
        last=None,
        restarts=0,
        started=True,
        ready=ready,
        over=over,
    )


def ready(some: Mapping[str, Any], container: ContainerView) -> tuple[str, str, str | None]:
    """Return the statuses of ContainersReady and Ready, and the message of Ready."""
    where = Placement(address="10.244.1.2", host_address="10.244.1.1", start_s=0.0)
    conditions = {each["type"]: each for each in pod_status(some, [container], where, now_s=1.0)["conditions"]}
    return conditions["ContainersReady"]["status"], conditions["Ready"]["status"], conditions["Ready"]["message"]
