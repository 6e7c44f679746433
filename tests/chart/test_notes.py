"""Tests of the notes that Helm prints after an installation."""

from collections.abc import Mapping
from typing import Any

import pytest

from chart.cases import APIS, CASES
from chart.rendering import notes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "helm test dualmap --namespace dualmap-system --logs"),
        ({}, "kubectl port-forward --namespace dualmap-system service/dualmap-gateway 8080:80"),
        ({}, "NOTE: the bundled Redis is for evaluation only."),
        (
            {"redis": {"mode": "none"}},
            "NOTE: the 2 routers share state through their connections, because redis.mode is none.",
        ),
        ({"router": {"replicas": 1}}, "answers requests with 503 router_unreachable"),
        ({}, "kubectl rollout status --namespace dualmap-system deployment/dualmap-router"),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 1}}},
            "WARNING: router.autoscaling.minReplicas is 1.",
        ),
        (
            {"router": {"autoscaling": {"enabled": True}}, "redis": {"mode": "none"}},
            "NOTE: the up to 8 routers share state through their connections, because redis.mode is none.",
        ),
        ({"monitoring": {"prometheusRule": {"enabled": True}}}, "alerts about the operator and about Envoy need"),
        ({"gateway": {"mode": "none"}}, "WARNING: the routers accept plain-text connections from every pod"),
        ({"gateway": {"mode": "none"}}, "let your Envoy present the certificate in the Secret dualmap-gateway-mtls"),
        (CASES["tls off"], "WARNING: the routers accept plain-text connections from every pod"),
        (
            {"monitoring": {"prometheusRule": {"enabled": True}}, "gateway": {"mode": "none"}},
            "alerts about the operator need",
        ),
        ({"operator": {"replicas": 1}}, "WARNING: operator.replicas is 1."),
        ({"networkPolicy": {"enabled": False}}, "WARNING: networkPolicy.enabled is false."),
        ({"gateway": {"mode": "none"}}, "WARNING: the NetworkPolicies block connections from Envoy to the routers"),
        ({"crds": {"enabled": False}}, "NOTE: crds.enabled is false"),
        ({"watchNamespace": "chat"}, "kubectl apply --namespace chat -f pool.yaml"),
        (CASES["hpa"], "WARNING: autoscaling.hpa needs a metrics adapter"),
        (
            {**CASES["keda"], **CASES["nobody measures"]},
            "WARNING: the NetworkPolicies block connections from KEDA to the routers",
        ),
        (
            {**CASES["monitoring"], **CASES["nobody measures"]},
            "WARNING: the NetworkPolicies block connections from Prometheus to the metrics",
        ),
    ],
)
def test_helm_notes_contain_next_steps_and_warnings(values: Mapping[str, Any], said: str) -> None:
    assert said in notes(values, apis=APIS)


def test_helm_notes_without_problems_contain_no_warning() -> None:
    external = {"redis": {"mode": "external", "external": {"url": "rediss://redis.cache:6380/0"}}}
    for values in (external, {**external, **CASES["monitoring"]}, {**external, **CASES["keda"]}):
        said = notes(values, apis=APIS)
        assert "WARNING" not in said
        assert "NOTE" not in said
