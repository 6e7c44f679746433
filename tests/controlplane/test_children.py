"""Tests of the manifests of a pool's children: complete, with an owner, and with the user's unchanged template."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from dualmap_operator.decide.spec import PoolSpec, SelectorWorkload
from dualmap_operator.decide.workload.children import children
from pod_templates import GOOD_CONTAINER, PORT, engine_with, odd_templates, pool_of, template_of

LABEL = "serving.dualmap.dev/pool"
GATE = {"conditionType": "serving.dualmap.dev/in-ring"}


def pod_template(spec: PoolSpec) -> Any:
    return children(spec, replicas=1)[0]["spec"]["template"]


def container(written: dict[str, Any], place: int = 0) -> Any:
    return pod_template(pool_of(template_of(written)))["spec"]["containers"][place]


def test_pool_has_three_child_objects_with_its_name() -> None:
    made = children(pool_of(template_of(GOOD_CONTAINER)), replicas=3)

    assert [(child["apiVersion"], child["kind"]) for child in made] == [
        ("apps/v1", "StatefulSet"),
        ("v1", "Service"),
        ("policy/v1", "PodDisruptionBudget"),
    ]
    assert {(child["metadata"]["namespace"], child["metadata"]["name"]) for child in made} == {("llm", "qwen")}


def test_child_objects_have_controller_reference_and_label() -> None:
    for child in children(pool_of(template_of(GOOD_CONTAINER)), replicas=3):
        assert child["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "serving.dualmap.dev/v1alpha1",
                "kind": "InferencePool",
                "name": "qwen",
                "uid": "7f7ad0a4",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert child["metadata"]["labels"] == {
            "app.kubernetes.io/name": "inference-engine",
            "app.kubernetes.io/instance": "qwen",
            "app.kubernetes.io/part-of": "dualmap",
            "app.kubernetes.io/managed-by": "dualmap-operator",
            LABEL: "qwen",
        }


def test_pool_of_adopted_pods_has_no_child_objects() -> None:
    adopted = SelectorWorkload(selector={"matchLabels": {"app": "qwen"}})

    assert children(replace(pool_of({}), workload=adopted), replicas=3) == ()


@pytest.mark.parametrize("replicas", [0, 1, 7])
def test_statefulset_uses_planned_replicas_not_spec_replicas(replicas: int) -> None:
    spec = pool_of(template_of(GOOD_CONTAINER))
    assert spec.replicas == 4

    content = children(spec, replicas=replicas)[0]["spec"]

    template = content.pop("template")
    assert content == {
        "replicas": replicas,
        "serviceName": "qwen",
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": {LABEL: "qwen"}},
    }
    assert template["metadata"]["labels"].items() >= {LABEL: "qwen"}.items()


def test_statefulset_size_change_changes_only_replicas() -> None:
    spec = pool_of(template_of(GOOD_CONTAINER))
    before, after = children(spec, replicas=4), children(replace(spec, replicas=9, generation=4), replicas=9)

    assert after[0]["spec"].pop("replicas") == 9
    assert before[0]["spec"].pop("replicas") == 4
    assert before == after


def test_service_is_headless_and_publishes_unready_pods() -> None:
    assert children(pool_of(template_of(GOOD_CONTAINER)), replicas=1)[1]["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {LABEL: "qwen"},
        "ports": [{"name": "http", "protocol": "TCP", "port": PORT, "targetPort": PORT}],
    }


def test_disruption_budget_allows_one_eviction_and_unready_pods() -> None:
    assert children(pool_of(template_of(GOOD_CONTAINER)), replicas=1)[2]["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": {LABEL: "qwen"}},
    }


def test_child_objects_keep_user_labels_except_dualmap_labels() -> None:
    template = template_of(GOOD_CONTAINER)
    template["metadata"] = {"labels": {"app": "qwen", LABEL: "another"}, "annotations": {"a": "b"}}

    made = pod_template(pool_of(template))

    assert made["metadata"] == {"labels": {"app": "qwen", LABEL: "qwen"}, "annotations": {"a": "b"}}


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": {"labels": None}}])
def test_template_without_labels_gets_the_selector_label(metadata: dict[str, Any]) -> None:
    made = pod_template(pool_of({**metadata, "spec": {"containers": [GOOD_CONTAINER]}}))

    assert made["metadata"] == {"labels": {LABEL: "qwen"}}


def test_readiness_gate_is_added_once_to_the_users_gates() -> None:
    own = {"conditionType": "example.com/warm"}

    assert pod_template(pool_of(template_of(GOOD_CONTAINER)))["spec"]["readinessGates"] == [GATE]
    for written in ([own], [own, GATE]):
        made = pod_template(pool_of(template_of(GOOD_CONTAINER, readinessGates=written)))
        assert made["spec"]["readinessGates"] == [own, GATE]


def test_pods_are_spread_over_nodes_and_zones_if_possible() -> None:
    rules = pod_template(pool_of(template_of(GOOD_CONTAINER)))["spec"]["topologySpreadConstraints"]

    assert [rule["topologyKey"] for rule in rules] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for rule in rules:
        assert rule["maxSkew"] == 1
        assert rule["whenUnsatisfiable"] == "ScheduleAnyway"
        assert rule["labelSelector"] == {"matchLabels": {LABEL: "qwen"}}


@pytest.mark.parametrize("own", [[], [{"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}]])
def test_topology_spread_of_the_user_is_kept(own: list[Any]) -> None:
    made = pod_template(pool_of(template_of(GOOD_CONTAINER, topologySpreadConstraints=own)))

    assert made["spec"]["topologySpreadConstraints"] == own


@pytest.mark.parametrize(
    ("pod", "drain_timeout_s", "expected"),
    [
        ({}, 600.0, 640),
        ({}, 0.5, 41),
        ({"terminationGracePeriodSeconds": None}, 60.0, 100),
        ({"terminationGracePeriodSeconds": 30}, 600.0, 640),
        ({"terminationGracePeriodSeconds": 3600}, 600.0, 3600),
    ],
)
def test_grace_period_covers_drain_and_keeps_longer_user_value(
    pod: dict[str, Any], drain_timeout_s: float, expected: int
) -> None:
    spec = pool_of(template_of(GOOD_CONTAINER, **pod), drain_timeout_s=drain_timeout_s)

    assert pod_template(spec)["spec"]["terminationGracePeriodSeconds"] == expected


def test_grace_period_covers_the_shutdown_timeout_of_vllm() -> None:
    engine = engine_with(args=["--shutdown-timeout", "90"])

    made = pod_template(pool_of(template_of(engine), drain_timeout_s=60.0))

    assert made["spec"]["terminationGracePeriodSeconds"] == 60 + 10 + 90


def test_pre_stop_script_is_set_with_the_pod_address() -> None:
    made = container(engine_with(env=[{"name": "A", "value": "b"}], lifecycle={"stopSignal": "SIGINT"}))

    shell, flag, script = made["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert "port=8000 metrics=/metrics timeout=600 settle=5" in script
    assert made["lifecycle"]["stopSignal"] == "SIGINT"
    address = {"name": "DUALMAP_POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    assert made["env"] == [{"name": "A", "value": "b"}, address]


def test_pre_stop_script_is_readable_in_yaml() -> None:
    script = container(engine_with())["lifecycle"]["preStop"]["exec"]["command"][2]

    # With these characters, YAML cannot write a text as a literal block.
    assert "\t" not in script
    assert all(line == line.rstrip() for line in script.splitlines())
    assert script.isascii()


def test_pre_stop_variable_of_the_user_is_kept() -> None:
    own = {"name": "DUALMAP_POD_IP", "value": "10.0.0.7"}

    assert container(engine_with(env=[own]))["env"] == [own]


def test_pre_stop_of_the_user_is_kept_unchanged() -> None:
    written = engine_with(lifecycle={"preStop": {"sleep": {"seconds": 5}}})

    assert container(written) == written


def test_engine_container_is_the_container_with_the_engine_port() -> None:
    sidecar = {"name": "proxy", "image": "envoy", "ports": [{"containerPort": 9901}]}

    made = pod_template(pool_of(template_of(sidecar, engine_with())))["spec"]["containers"]

    assert made[0] == sidecar
    assert "preStop" in made[1]["lifecycle"]


def test_engine_container_without_declared_port_is_the_first() -> None:
    sidecar = {"name": "proxy", "image": "envoy"}

    made = pod_template(pool_of(template_of(engine_with(ports=None), sidecar)))["spec"]["containers"]

    assert "preStop" in made[0]["lifecycle"]
    assert made[1] == sidecar


def test_template_fields_without_operator_changes_are_kept() -> None:
    written = template_of(
        GOOD_CONTAINER,
        nodeSelector={"gpu": "h200"},
        volumes=[{"name": "models", "hostPath": {"path": "/m"}}],
        tomorrow={"field": [1, None]},
    )

    made = pod_template(pool_of(written))["spec"]

    for field in ("nodeSelector", "volumes", "tomorrow"):
        assert made[field] == written["spec"][field]
    assert made["containers"][0].items() >= GOOD_CONTAINER.items()


def test_child_objects_are_independent_copies() -> None:
    written = template_of(engine_with(env=[], lifecycle={}), readinessGates=[])
    before = copy.deepcopy(written)
    spec = pool_of(written)

    first, second = children(spec, replicas=1), children(spec, replicas=1)
    assert first == second
    first[0]["spec"]["template"]["spec"]["containers"][0]["args"].append("--more")
    first[0]["spec"]["selector"]["matchLabels"]["more"] = "labels"

    assert written == before
    assert children(spec, replicas=1) == second
    assert first[2]["spec"]["selector"] == second[2]["spec"]["selector"]


@given(odd_templates())
def test_child_objects_are_built_for_any_template(template: dict[str, Any]) -> None:
    before = copy.deepcopy(template)
    spec = pool_of(template)

    made = children(spec, replicas=2)

    assert template == before
    assert json.loads(json.dumps(made)) == list(made)
    assert children(spec, replicas=2) == made


def test_invalid_template_fields_are_passed_to_the_api_server() -> None:
    odd = {
        "metadata": {"labels": ["a"]},
        "spec": {
            "containers": [engine_with(lifecycle="never", env="none")],
            "readinessGates": "none",
            "topologySpreadConstraints": "wide",
            "terminationGracePeriodSeconds": "long",
        },
    }

    assert pod_template(pool_of(odd)) == odd
