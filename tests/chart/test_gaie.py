"""Tests of ``gateway.mode: gaie``: pickers for the pools of a gateway, without operator and routers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.cases import APIS, GAIE, GATEWAYS, HEADERS, PICKER_CASES, PLACED, POOLS, SETTINGS
from chart.objects import pods
from chart.rendering import NAMESPACE, Object, named, notes, only, refused, render

GOLDENS = Path(__file__).parent / "goldens"
PICKERS = ["dualmap-epp-other", "dualmap-epp-qwen"]


def picker(objects: Sequence[Object], name: str = "dualmap-epp-qwen") -> Any:
    (found,) = [each for each in pod(objects, name)["containers"] if each["name"] == "epp"]
    return found


def pod(objects: Sequence[Object], name: str = "dualmap-epp-qwen") -> Any:
    return only(objects, "Deployment", name)["spec"]["template"]["spec"]


def with_pools(*pools: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    gateway = {"mode": "gaie", "gaie": {"pools": list(pools)}}
    return {"gateway": gateway, "networkPolicy": {"enabled": False}, **values}


def test_gaie_objects_equal_the_golden_file() -> None:
    objects = render(PICKER_CASES["gaie with istio"], apis=APIS)
    wanted = [
        ("InferencePool", "qwen"),
        ("DestinationRule", "dualmap-epp-qwen"),
        ("Service", "dualmap-epp-qwen"),
        ("Role", "dualmap-epp-qwen"),
    ]
    shown = [only(objects, kind, name) for kind, name in wanted]
    assert shown == list(yaml.safe_load_all((GOLDENS / "gaie.yaml").read_text()))


@pytest.mark.parametrize("case", PICKER_CASES)
def test_gaie_installs_pickers_and_nothing_else(case: str) -> None:
    objects = render(PICKER_CASES[case], apis=APIS)
    names = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in objects}
    assert {name.partition("-")[0] for name in names} <= {"epp", "monitoring"}
    kinds = {each["kind"] for each in objects}
    assert not kinds & {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Secret", "Pod"}
    assert not [kind for kind in kinds if kind.startswith("Validating")]


def test_picker_objects_are_in_the_namespace_of_the_pool() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    places = {each["metadata"]["name"]: each["metadata"]["namespace"] for each in objects}
    assert places == {
        "qwen": "llm",
        "dualmap-epp-qwen": "llm",
        "dualmap-epp-qwen-peers": "llm",
        "dualmap-epp-other": NAMESPACE,
        "dualmap-epp-other-peers": NAMESPACE,
    }


def test_picker_replicas_default_to_the_routers() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    assert named(objects, "Deployment") == PICKERS
    assert [only(objects, "Deployment", name)["spec"]["replicas"] for name in PICKERS] == [3, 2]
    assert named(objects, "PodDisruptionBudget") == PICKERS


def test_picker_arguments_name_the_pool_and_the_other_pickers() -> None:
    args = picker(render(PICKER_CASES["gaie"], apis=APIS))["args"]
    assert args[:4] == [
        "--pool-name=qwen",
        "--pool-namespace=llm",
        "--pool-group=inference.networking.k8s.io",
        "--peer=dualmap-epp-qwen-peers.llm:9002",
    ]


def test_picker_settings_are_a_file_and_their_change_replaces_pods() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    made = only(objects, "ConfigMap", "dualmap-epp-other")
    assert yaml.safe_load(made["data"]["settings.yaml"]) == {"spec": SETTINGS}
    container = picker(objects, "dualmap-epp-other")
    (mount,) = container["volumeMounts"]
    assert f"--routing={mount['mountPath']}/settings.yaml" in container["args"]

    def annotations(**settings: Any) -> Any:
        pool = {"name": "qwen", "settings": settings}
        return only(render(with_pools(pool)), "Deployment", "dualmap-epp-qwen")["spec"]["template"]["metadata"]

    assert annotations(slo={"ttft": "2s"}) == annotations(slo={"ttft": "2s"}) != annotations(slo={"ttft": "3s"})


def test_picker_without_settings_mounts_no_volume() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    assert "volumes" not in pod(objects)
    assert "volumeMounts" not in picker(objects)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("gaie", ["--secure-serving=true"]),
        ("gaie in plain text", ["--secure-serving=false"]),
        ("gaie with everything", ["--secure-serving=true", "--cert-path=/etc/dualmap/tls"]),
    ],
)
def test_picker_tls_follows_the_mode(case: str, wanted: Sequence[str]) -> None:
    args = picker(render(PICKER_CASES[case], apis=APIS))["args"]
    assert [arg for arg in args if arg.startswith(("--secure", "--cert"))] == wanted


def test_picker_service_works_with_and_without_tls() -> None:
    for case in PICKER_CASES.values():
        for name in ("dualmap-epp-qwen", "dualmap-epp-qwen-peers"):
            ports = only(render(case, apis=APIS), "Service", name)["spec"]["ports"]
            assert (ports[0]["port"], ports[0]["appProtocol"]) == (9002, "http2")


def test_picker_has_the_settings_of_routers() -> None:
    objects = render(PICKER_CASES["gaie with everything"], apis=APIS)
    container, spec = picker(objects), pod(objects)
    assert {
        "--drain-timeout=2m",
        "--no-dashboard",
        "--hash-key-file=/etc/dualmap/hash-key/key",
        "--otlp-endpoint=http://collector.monitoring:4317",
        "--log-level=debug",
    } <= set(container["args"])
    assert [each["name"] for each in container["env"]] == ["POD_NAME", HEADERS["name"]]
    assert "--record=/var/lib/dualmap/recordings/$(POD_NAME)" in container["args"]
    assert [each["name"] for each in spec["initContainers"]] == ["recordings-key"]
    assert spec["terminationGracePeriodSeconds"] == 135
    assert (spec["nodeSelector"], spec["tolerations"]) == (PLACED["nodeSelector"], PLACED["tolerations"])
    assert [each["name"] for each in spec["containers"]] == ["epp", "renderer-qwen"]
    assert {each["name"] for each in spec["volumes"]} == {
        "tls",
        "settings",
        "hash-key",
        "tokenizer-qwen",
        "tokenizer-llama",
        "recordings",
        "recordings-key",
    }


def test_picker_that_waits_for_its_pool_is_not_restarted() -> None:
    container = picker(render(PICKER_CASES["gaie"], apis=APIS))
    assert container["livenessProbe"]["grpc"] == {"port": 9003, "service": "liveness"}
    assert container["readinessProbe"]["grpc"] == {"port": 9003}


def test_picker_role_names_only_its_own_pool() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    for name in PICKERS:
        rules = only(objects, "Role", name)["rules"]
        assert {verb for rule in rules for verb in rule["verbs"]} == {"list", "watch"}
        pools = [rule for rule in rules if rule["resources"] == ["inferencepools"]]
        assert {tuple(rule["resourceNames"]) for rule in pools} == {(name.rpartition("-")[2],)}


def test_network_policy_admits_gateway_pickers_and_prometheus() -> None:
    objects = render(PICKER_CASES["gaie"], apis=APIS)
    assert named(objects, "NetworkPolicy") == PICKERS
    gateway, metrics = only(objects, "NetworkPolicy", "dualmap-epp-qwen")["spec"]["ingress"]
    assert [port["port"] for port in gateway["ports"]] == ["grpc"]
    labels = next(labels for name, labels, _ in pods(objects) if name == "dualmap-epp-qwen")
    *others, own = gateway["from"]
    assert others == GATEWAYS
    assert own["podSelector"]["matchLabels"].items() <= labels.items()
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]
    closed = render(PICKER_CASES["gaie in plain text"], apis=APIS)
    assert len(only(closed, "NetworkPolicy", "dualmap-epp-qwen")["spec"]["ingress"]) == 1


def test_inference_pool_has_every_port_and_the_picker() -> None:
    spec = only(render(PICKER_CASES["gaie with everything"], apis=APIS), "InferencePool", "qwen")["spec"]
    assert spec["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert spec["selector"] == {"matchLabels": {"app": "qwen"}}
    assert spec["endpointPickerRef"]["name"] == "dualmap-epp-qwen"
    assert spec["endpointPickerRef"]["failureMode"] == "FailClose"


def test_monitoring_of_pickers_has_no_alert_about_the_operator() -> None:
    objects = render(PICKER_CASES["gaie with everything"], apis=APIS)
    groups = only(objects, "PrometheusRule", "dualmap")["spec"]["groups"]
    assert [each["name"] for each in groups] == ["dualmap-slo", "dualmap-routing", "dualmap-membership"]
    assert named(objects, "ServiceMonitor") == ["dualmap-epp-qwen"]
    assert "PodMonitor" not in {each["kind"] for each in objects}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway": {"mode": "gaie"}}, "list the pools in gateway.gaie.pools"),
        ({"gateway": {"gaie": {"pools": [{"name": "a"}]}}}, "set gateway.mode to gaie, or remove the pools"),
        ({"gateway": GAIE}, "set networkPolicy.gatewayFrom to the gateway's pods"),
        (with_pools({"name": "a"}, {"name": "a", "namespace": NAMESPACE}), f"{NAMESPACE}/a is listed twice"),
        (with_pools({"name": "a" * 50}), "set fullnameOverride to a shorter prefix"),
        (with_pools({"name": "a"}, watchNamespace="llm"), "set the namespace of each entry"),
        (with_pools({"name": "a"}, models={"gpt": "prod"}), "models: not used with gateway.mode=gaie"),
        (with_pools({"name": "a"}, autoscaling={"hpa": POOLS}), "autoscaling.hpa: not used"),
        (with_pools({"name": "a"}, autoscaling={"keda": POOLS}), "autoscaling.keda: not used"),
        (with_pools({"name": "a"}, router={"autoscaling": {"enabled": True}}), "number of pickers by router.replicas"),
        (with_pools({"name": "a"}, router={"tls": {"mutual": True}}), "present no client certificate"),
        (with_pools({"name": "a"}, router={"tls": {"mode": "generated"}}), "use auto (each picker makes its"),
        (with_pools({"name": "a"}, router={"tls": {"mode": "secret"}}), "set router.tls.secretName"),
        (with_pools({"name": "a"}, rbac={"ownerReferences": True}), "it is a permission of the operator"),
        (with_pools({"name": "a"}, monitoring={"podMonitor": {"enabled": True}}), "set monitoring.serviceMonitor"),
        (
            with_pools({"name": "a"}, redis={"mode": "external", "external": {"url": "redis://redis.cache"}}),
            "share state through their connections",
        ),
        (
            {
                "gateway": {"mode": "gaie", "gaie": {"pools": [{"name": "a"}], "istio": {"destinationRule": True}}},
                "router": {"tls": {"mode": "none"}},
            },
            "requires TLS between Istio and the pickers",
        ),
    ],
)
def test_gaie_values_that_contradict_are_rejected(values: Mapping[str, Any], said: str) -> None:
    assert said in refused(values, apis=APIS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (PICKER_CASES["gaie"], "inference.networking.k8s.io/v1/InferencePool"),
        (with_pools({"name": "a"}, monitoring={"serviceMonitor": {"enabled": True}}), "v1/ServiceMonitor"),
    ],
)
def test_gaie_option_without_its_cluster_api_is_rejected(values: Mapping[str, Any], said: str) -> None:
    message = refused(values)
    assert "this cluster does not serve" in message
    assert said in message


def test_picker_of_an_existing_pool_needs_no_cluster_api() -> None:
    """Tools that render without a cluster need no further option."""
    assert named(render(with_pools({"name": "qwen"})), "InferencePool") == []


class TestNotes:
    @pytest.mark.parametrize(
        ("values", "said"),
        [
            (PICKER_CASES["gaie"], "kubectl rollout status --namespace llm deployment/dualmap-epp-qwen"),
            (PICKER_CASES["gaie"], "Create an HTTPRoute with this backendRef"),
            (PICKER_CASES["gaie"], "kubectl patch --namespace dualmap-system inferencepools.inference.networking"),
            (PICKER_CASES["gaie"], "NOTE: the pickers accept only TLS connections."),
            (PICKER_CASES["gaie"], "NOTE: the pickers have no secret key"),
            (PICKER_CASES["gaie in plain text"], "WARNING: the pickers accept plain-text connections"),
            (PICKER_CASES["gaie with istio"], "WARNING: networkPolicy.enabled is false."),
        ],
    )
    def test_gaie_notes_contain_next_steps_and_warnings(self, values: Mapping[str, Any], said: str) -> None:
        assert said in notes(values, apis=APIS)

    def test_gaie_notes_say_nothing_of_operator_and_redis(self) -> None:
        said = notes(PICKER_CASES["gaie with everything"], apis=APIS)
        assert not [
            word for word in ("Redis", "dmpool", "CRD", "WARNING", "-router", "NOTE: the pickers have") if word in said
        ]
        assert "NOTE" not in notes(
            {**PICKER_CASES["gaie with istio"], "router": {"hashKey": {"secretName": "h"}}}, apis=APIS
        )
