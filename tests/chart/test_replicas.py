"""Tests of the numbers of the chart's routers, of their autoscalers, and of how routers find each other."""

import pytest
import yaml

from chart.cases import APIS, CASES, POOLS
from chart.rendering import ROOT, only, render
from chart.workloads import container, workload


def test_router_number_is_the_charts_without_autoscaling() -> None:
    objects = render()
    assert workload(objects, "router")["spec"]["replicas"] == 2
    assert not [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]


def test_router_autoscaler_alone_sets_the_number_of_routers() -> None:
    """A tool that applies the chart again must not undo the autoscaler's change."""
    objects = render(CASES["routers by an hpa"])
    assert "replicas" not in workload(objects, "router")["spec"]
    spec = only(objects, "HorizontalPodAutoscaler", "dualmap-router")["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "dualmap-router"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 12)
    (metric,) = spec["metrics"]
    assert metric["containerResource"] == {
        "name": "cpu",
        "container": container(objects, "router", "router")["name"],
        "target": {"type": "Utilization", "averageUtilization": 50},
    }
    # The routers leave one at a time, so that at most one drains.
    assert spec["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_envoy_configuration_names_no_single_router() -> None:
    """A change of the number of routers must change nothing else."""
    two, four = (
        [each for each in render({"router": {"replicas": number}}) if each["metadata"]["name"] != "dualmap-router"]
        for number in (2, 4)
    )
    assert two == four
    assert not [each for each in container(two, "gateway", "bootstrap")["args"] if each.startswith("--als")]


def test_routers_find_starting_and_draining_routers() -> None:
    objects = render()
    peers, ready = (only(objects, "Service", f"dualmap-router{name}")["spec"] for name in ("-peers", ""))
    assert "--peer=dualmap-router-peers.dualmap-system:9002" in container(objects, "router", "router")["args"]
    assert peers["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in ready
    assert peers["clusterIP"] == ready["clusterIP"] == "None"
    assert [port["port"] for port in peers["ports"]] == [9002]


class TestAutoscalers:
    def test_autoscaler_targets_the_pool_and_scales_down_slowly(self) -> None:
        hpa = only(render(CASES["hpa"]), "HorizontalPodAutoscaler", "qwen")
        keda = only(render(CASES["keda"], apis=APIS), "ScaledObject", "qwen")
        behavior = hpa["spec"]["behavior"]
        assert keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == behavior
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] < behavior["scaleDown"]["stabilizationWindowSeconds"]
        for each in (hpa, keda):
            assert each["metadata"]["namespace"] == "llm"
            assert each["spec"]["scaleTargetRef"] == {
                "apiVersion": "serving.dualmap.dev/v1alpha1",
                "kind": "InferencePool",
                "name": "qwen",
            }

    def test_keda_values_set_polling_and_cooldown(self) -> None:
        entry = {**POOLS[0], "pollingInterval": 5, "cooldownPeriod": 0}
        spec = only(render({"autoscaling": {"keda": [entry]}}, apis=APIS), "ScaledObject", "qwen")["spec"]
        assert (spec["pollingInterval"], spec["cooldownPeriod"]) == (5, 0)

    @pytest.mark.parametrize(
        ("case", "port", "encrypted"),
        [
            ("keda", 9003, False),  # routers require a client certificate on 9002, which KEDA does not have
            ("keda over tls", 9002, True),
            ("keda over mutual tls", 9002, False),  # by its TriggerAuthentication
        ],
    )
    def test_keda_uses_a_port_that_needs_no_further_certificate(self, case: str, port: int, encrypted: bool) -> None:
        (trigger,) = only(render(CASES[case], apis=APIS), "ScaledObject", "qwen")["spec"]["triggers"]
        assert trigger["metadata"]["scalerAddress"] == f"dualmap-router.dualmap-system:{port}"
        assert ("enableTLS" in trigger["metadata"]) is encrypted
        assert trigger.get("authenticationRef") == ({"name": "dualmap"} if "mutual" in case else None)

    def test_rendered_hpa_equals_the_documented_example(self) -> None:
        example = yaml.safe_load((ROOT / "manifests" / "examples" / "hpa.yaml").read_text())
        assert only(render(CASES["hpa"]), "HorizontalPodAutoscaler", "qwen")["spec"] == example["spec"]

    def test_rendered_scaled_object_equals_the_documented_example(self) -> None:
        example = yaml.safe_load((ROOT / "manifests" / "examples" / "keda.yaml").read_text())
        entry = {**POOLS[0], "minReplicas": 0}
        made = only(render({"autoscaling": {"keda": [entry]}}, apis=APIS), "ScaledObject", "qwen")
        assert made["spec"] == example["spec"]
