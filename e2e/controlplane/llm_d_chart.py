"""llm-d's charts of its picker: the objects of one, and a copy of the charts for `helm`.

The charts are in no package that the tests can have. ``picker`` makes the objects of llm-d-router-gateway 0.9 with its
default values. To test the chart itself, set DUALMAP_LLM_D_CHARTS to the folder config/charts of llm-d-router v0.9.0.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.helm import references

CHART = "llm-d-router-gateway"
IMAGE = "ghcr.io/llm-d/llm-d-router-endpoint-picker-dev:main"
"""The picker's image in the chart's values."""
_CHARTS = "DUALMAP_LLM_D_CHARTS"
_PLUGINS = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {"type": "queue-scorer"},
        {"type": "kv-cache-utilization-scorer"},
        {"type": "prefix-cache-scorer"},
        {"type": "metrics-data-source", "parameters": {"scheme": "http", "path": "/metrics"}},
        {"type": "core-metrics-extractor"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "queue-scorer", "weight": 2},
                {"pluginRef": "kv-cache-utilization-scorer", "weight": 2},
                {"pluginRef": "prefix-cache-scorer", "weight": 3},
            ],
        }
    ],
}


def copy_charts(directory: Path) -> None:
    """Copy the charts into a folder; skip the test if there are none."""
    charts = os.environ.get(_CHARTS)
    if not charts:
        pytest.skip(f"{_CHARTS} does not name the folder of llm-d's charts")
    shutil.copytree(charts, directory, dirs_exist_ok=True)


def label(pool: str) -> str:
    """Return the label of the picker's pods as a selector."""
    return "=".join(*_labels(pool).items())


def picker(namespace: str, pool: str, replicas: int) -> list[dict[str, Any]]:
    """Return the objects of a picker with several replicas, without the InferencePool."""
    name = f"{pool}-epp"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        *_permissions(namespace, name),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"default-plugins.yaml": json.dumps(_PLUGINS)},
        },
        _service(name, _labels(pool)),
        _deployment(name, _labels(pool), _container(namespace, pool), replicas),
    ]


def _labels(pool: str) -> dict[str, str]:
    return {CHART: f"{pool}-epp"}


def _permissions(namespace: str, name: str) -> list[dict[str, Any]]:
    rules = [
        {"apiGroups": [""], "resources": ["pods"]},
        {
            "apiGroups": ["inference.networking.x-k8s.io", "llm-d.ai"],
            "resources": ["inferenceobjectives", "inferencemodelrewrites"],
        },
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]},
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": name},
            "rules": [{**rule, "verbs": ["get", "watch", "list"]} for rule in rules],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]


def _container(namespace: str, pool: str) -> dict[str, Any]:
    return {
        "name": "epp",
        "image": references().epp,
        "imagePullPolicy": "Always",
        "args": [
            "--pool-name", pool, "--pool-namespace", namespace, "--pool-group", "inference.networking.k8s.io",
            "--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--ha-enable-leader-election",
            "--grpc-health-port", "9003", "--v=2", "--tracing=false", "--metrics-endpoint-auth=false",
        ],
        "resources": {"requests": {"cpu": "8", "memory": "8Gi"}, "limits": {"memory": "16Gi"}},
        "ports": [
            {"name": "grpc", "containerPort": 9002},
            {"name": "grpc-health", "containerPort": 9003},
            {"name": "metrics", "containerPort": 9090},
        ],
        "livenessProbe": {
            "grpc": {"port": 9003, "service": "liveness"}, "initialDelaySeconds": 5, "periodSeconds": 10,
        },
        "readinessProbe": {"grpc": {"port": 9003, "service": "readiness"}, "periodSeconds": 2},
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", "sleep 5"]}}},
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "volumeMounts": [{"name": "plugins-config-volume", "mountPath": "/config"}],
    }  # fmt: skip


def _service(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": labels,
            "ports": [
                {"name": "grpc-ext-proc", "port": 9002, "appProtocol": "kubernetes.io/h2c"},
                {"name": "http-metrics", "port": 9090},
            ],
        },
    }


def _deployment(name: str, labels: Mapping[str, str], container: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": name,
                    "terminationGracePeriodSeconds": 130,
                    "containers": [container],
                    "volumes": [{"name": "plugins-config-volume", "configMap": {"name": name}}],
                },
            },
        },
    }
