"""Tests of the environment and the command line that the kubelet sets for a container."""

from collections.abc import Mapping
from typing import Any

import pytest

from emulated_cluster.kubelet.pod_spec.environment import (
    ContainerConfigError,
    Field,
    Values,
    command_line,
    environment,
    expand,
    references,
    service_links,
)
from kubelet_objects import pod


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(HOST):$(PORT)", "10.0.0.1:80"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(HOST)", "$(HOST)"),
        ("a $ b $HOST", "a $ b $HOST"),
        ("$(HOST", "$(HOST"),
    ],
)
def test_variable_references_are_expanded(text: str, expanded: str) -> None:
    assert expand(text, {"HOST": "10.0.0.1", "PORT": "80"}) == expanded


def test_environment_has_pod_fields_and_earlier_variables() -> None:
    container = {
        "name": "engine",
        "command": ["serve", "--url=$(URL)"],
        "args": ["$(INDEX)", "$(LATER)"],
        "env": [
            {"name": "EARLY", "value": "$(URL)"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(POD_IP)/"},
            {
                "name": "INDEX",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
            },
        ],
    }

    told = environment(container, fields(), base={"PATH": "/bin"}, objects=nothing)

    assert told == {
        "PATH": "/bin",
        "EARLY": "$(URL)",
        "POD_IP": "10.244.1.2",
        "URL": "http://10.244.1.2/",
        "INDEX": "0",
    }
    assert command_line(container, told) == ["serve", "--url=http://10.244.1.2/", "0", "$(LATER)"]


@pytest.mark.parametrize(
    ("resource", "divisor", "value"),
    [
        ("limits.cpu", "1", "2"),
        ("limits.cpu", "1m", "1500"),
        ("limits.memory", "1", str(1 << 30)),
        ("requests.memory", "1Mi", "128"),
        ("requests.memory", "0", str(128 << 20)),
    ],
)
def test_resource_reference_is_rounded_up_in_units_of_divisor(resource: str, divisor: str, value: str) -> None:
    reference = {"resourceFieldRef": {"resource": resource, "divisor": divisor}}
    container = {
        "name": "proxy",
        "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}, "requests": {"memory": "128Mi"}},
        "env": [{"name": "GIVEN", "valueFrom": reference}],
    }

    assert environment(container, fields(), base={}, objects=nothing) == {"GIVEN": value}


def test_resource_reference_without_a_limit_is_rejected() -> None:
    reference = {"resourceFieldRef": {"resource": "limits.cpu"}}
    container = {"name": "proxy", "env": [{"name": "GIVEN", "valueFrom": reference}]}

    with pytest.raises(ContainerConfigError, match=r"limits\.cpu: the container does not set it"):
        environment(container, fields(), base={}, objects=nothing)


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"env": [{"name": "A", "valueFrom": {"fileKeyRef": {}}}]}, "env A: valueFrom.fileKeyRef"),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}, 'env A: secret "s"'),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}, "fieldPath spec.x"),
        ({"envFrom": [{"configMapRef": {"name": "c"}}]}, 'envFrom: configMap "c" not found'),
        ({}, "command is missing"),
    ],
)
def test_variable_with_unknown_source_is_rejected(container: Mapping[str, Any], said: str) -> None:
    named = {"name": "engine", **container}

    with pytest.raises(ContainerConfigError, match=said):
        command_line(named, environment(named, fields(), base={}, objects=nothing))


def test_variables_come_from_config_maps_and_secrets() -> None:
    container = {
        "name": "engine",
        "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "C_"}, {"secretRef": {"name": "gone", "optional": True}}],
        "env": [
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "none", "optional": True}}},
            {"name": "URL", "value": "redis://:$(PASSWORD)@$(C_host)/"},
        ],
    }
    there = {("configMap", "c"): {"host": b"redis"}, ("secret", "s"): {"password": b"word"}}

    told = environment(container, fields(), base={}, objects=lambda kind, name: there.get((kind, name)))

    assert told == {"C_host": "redis", "PASSWORD": "word", "URL": "redis://:word@redis/"}
    assert references(container) == {*there, ("secret", "gone")}


def test_environment_has_variables_for_namespace_services() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "tls", "port": 443, "protocol": "TCP"}]
    service = {"metadata": {"name": "front-door"}, "spec": {"clusterIP": "10.0.0.7", "ports": ports}}
    headless = {"metadata": {"name": "members"}, "spec": {"clusterIP": "None", "ports": ports}}

    told = service_links([service, headless])

    assert told == {
        "FRONT_DOOR_SERVICE_HOST": "10.0.0.7",
        "FRONT_DOOR_SERVICE_PORT": "80",
        "FRONT_DOOR_SERVICE_PORT_HTTP": "80",
        "FRONT_DOOR_SERVICE_PORT_TLS": "443",
        "FRONT_DOOR_PORT": "tcp://10.0.0.7:80",
        "FRONT_DOOR_PORT_80_TCP": "tcp://10.0.0.7:80",
        "FRONT_DOOR_PORT_80_TCP_PROTO": "tcp",
        "FRONT_DOOR_PORT_80_TCP_PORT": "80",
        "FRONT_DOOR_PORT_80_TCP_ADDR": "10.0.0.7",
        "FRONT_DOOR_PORT_443_TCP": "tcp://10.0.0.7:443",
        "FRONT_DOOR_PORT_443_TCP_PROTO": "tcp",
        "FRONT_DOOR_PORT_443_TCP_PORT": "443",
        "FRONT_DOOR_PORT_443_TCP_ADDR": "10.0.0.7",
    }


def test_container_without_command_runs_the_entrypoint() -> None:
    container = {"name": "engine", "args": ["operator"]}

    assert command_line(container, {}, entrypoint=("dualmap",)) == ["dualmap", "operator"]
    assert command_line({**container, "command": ["sh"]}, {}, entrypoint=("dualmap",)) == ["sh", "operator"]


def fields() -> Field:
    return Field(pod=pod(), address="10.244.1.2", host_address="10.244.1.1")


def nothing(kind: str, name: str) -> Values:
    return None
