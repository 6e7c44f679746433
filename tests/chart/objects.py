"""Queries on rendered objects: pods, selectors, and errors against the schemas of Kubernetes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource

from chart.rendering import Object

_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Mapping[str, str], Any]]:
    """Yield (name, labels, spec) of each Pod, and of the pods of each Deployment and StatefulSet."""
    for each in objects:
        if each["kind"] in {"Deployment", "StatefulSet"}:
            template = each["spec"]["template"]
            yield each["metadata"]["name"], template["metadata"]["labels"], template["spec"]
        elif each["kind"] == "Pod":
            yield each["metadata"]["name"], each["metadata"]["labels"], each["spec"]


def containers(spec: Any) -> list[Any]:
    """Return a pod's containers, init containers first."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def ports(spec: Any) -> dict[str, int]:
    """Return the named ports of a pod."""
    return {
        port["name"]: port["containerPort"] for container in containers(spec) for port in container.get("ports", ())
    }


def selected(objects: Sequence[Object], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the specs of the pods with these labels, by name."""
    return {name: spec for name, has, spec in pods(objects) if labels.items() <= has.items()}


def complaints(thing: Object, kube_version: str) -> list[str] | None:
    """Return the object's schema errors for this Kubernetes version, or None if the version lacks the object's kind."""
    return _complaints(json.dumps(thing, sort_keys=True), kube_version)


@cache
def _complaints(thing: str, kube_version: str) -> list[str] | None:
    parsed = json.loads(thing)
    validator = _validator(parsed["kind"], parsed["apiVersion"], kube_version)
    if validator is None:
        return None
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(parsed)]


@cache
def _validator(kind: str, api_version: str, kube_version: str) -> jsonschema.Draft202012Validator | None:
    # The names of the schema files do not contain the API group's domain.
    group, _, version = api_version.rpartition("/")
    name = "-".join([kind.lower(), *([group.split(".")[0]] if group else []), version])
    file = _SCHEMAS / f"v{kube_version}-local-strict" / f"{name}.json"
    if not file.exists():
        return None
    schema = Resource.from_contents(json.loads(file.read_text()))
    return jsonschema.Draft202012Validator(schema.contents, registry=schema @ _definitions(kube_version))


@cache
def _definitions(kube_version: str) -> Registry[Any]:
    text = (_SCHEMAS / f"v{kube_version}-local-strict" / "_definitions.json").read_text()
    return Resource.from_contents(json.loads(text)) @ Registry()
