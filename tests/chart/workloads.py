"""The Deployments of a rendered chart, by their component."""

from collections.abc import Sequence
from typing import Any

from chart.rendering import Object, only

POD_NAMESPACE = {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}


def workload(objects: Sequence[Object], component: str) -> Object:
    return only(objects, "Deployment", f"dualmap-{component}")


def container(objects: Sequence[Object], component: str, name: str) -> Any:
    spec = workload(objects, component)["spec"]["template"]["spec"]
    (found,) = [each for each in (*spec.get("initContainers", ()), *spec["containers"]) if each["name"] == name]
    return found
