"""Tests of the rendered chart: each setting, cluster-wide and namespaced permissions, three versions of Kubernetes.

The tests check every object against Kubernetes' strict schemas, and check invariants for all values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import pytest

from chart.cases import APIS, CASES, GATEWAYS, PICKER_CASES, SECRET_TLS
from chart.objects import complaints, containers, pods, ports, selected
from chart.rendering import KUBE_VERSION, NAMESPACE, Object, render, text
from dualmap_extproc.app.envoy_config import envoy_config
from dualmap_extproc.app.epp import epp
from dualmap_extproc.app.main import router
from dualmap_operator.main import operator

KUBE_VERSIONS = ("1.32.0", KUBE_VERSION, "1.37.0")
COMMANDS: Mapping[str, click.Command] = {
    "router": router,
    "epp": epp,
    "operator": operator,
    "envoy-config": envoy_config,
}
ELSEWHERE = {
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Certificate": "cert-manager.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "DestinationRule": "networking.istio.io/v1",
}
ADMISSION = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
CLUSTER_WIDE = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", *ADMISSION}
# The chart does not create these Secrets: the values contain the names, or cert-manager creates the Secrets.
SECRETS_OF_OTHERS = {
    "routers",
    "envoys",
    "redis",
    "hashes",
    "redis-ca",
    "dualmap-router-tls",
    "dualmap-gateway-tls",
} | {"recordings-key"}


ALL_CASES = {**CASES, **PICKER_CASES}


@pytest.fixture(name="objects", params=ALL_CASES)
def _objects(request: pytest.FixtureRequest) -> Sequence[Object]:
    return render(ALL_CASES[request.param], apis=APIS)


@pytest.fixture(name="operated", params=CASES)
def _operated(request: pytest.FixtureRequest) -> Sequence[Object]:
    """The objects of a release with an operator and routers."""
    return render(CASES[request.param], apis=APIS)


def template(spec: Any, name: str) -> Any:
    (found,) = [each for each in containers(spec) if each["name"] == name]
    return found


@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
def test_rendered_objects_are_valid_for_kubernetes(objects: Sequence[Object], kube_version: str) -> None:
    for each in objects:
        found = complaints(each, kube_version)
        if found is None:
            assert ELSEWHERE[each["kind"]] == each["apiVersion"]
        else:
            assert not found, f"{each['kind']} {each['metadata']['name']}"


def test_rendered_chart_is_equal_for_every_kubernetes_version() -> None:
    """This equality lets the other tests check a single version."""
    for case in ("defaults", "monitoring", "gaie with istio"):
        rendered = [render(ALL_CASES[case], apis=APIS, kube_version=version) for version in KUBE_VERSIONS]
        assert rendered[0] == rendered[1] == rendered[2]


def test_rendered_objects_are_unique_labelled_and_namespaced(objects: Sequence[Object]) -> None:
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(set(keys)) == len(keys)
    for kind, namespace, name in keys:
        assert (namespace is None) == (kind in CLUSTER_WIDE), name
        assert len(name) <= 63
    for each in objects:
        if each["kind"] != "CustomResourceDefinition":
            assert each["metadata"]["labels"].items() >= {
                ("app.kubernetes.io/name", "dualmap"),
                ("app.kubernetes.io/instance", "dualmap"),
                ("app.kubernetes.io/managed-by", "Helm"),
            }


def test_chart_pods_meet_the_restricted_security_standard(objects: Sequence[Object]) -> None:
    for _, _, spec in pods(objects):
        assert spec["securityContext"]["runAsNonRoot"] is True
        # Without runAsUser, OpenShift assigns a user.
        assert spec["securityContext"].get("runAsUser", 1) > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not [port for port in container.get("ports", ()) if "hostPort" in port]
        for volume in spec.get("volumes", ()):
            # The standard allows claims and images, too.
            assert set(volume) - {"name"} <= {"emptyDir", "configMap", "secret", "persistentVolumeClaim", "image"}


def test_chart_containers_have_image_tag_and_resource_requests(objects: Sequence[Object]) -> None:
    for _, _, spec in pods(objects):
        for container in containers(spec):
            assert re.fullmatch(r"[^@]+(?::(?!latest$)[^:/@]+|@sha256:[0-9a-f]{64})", container["image"])
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_api_token_is_mounted_only_in_pods_using_the_api_server(objects: Sequence[Object]) -> None:
    bound = {
        subject["name"] for each in objects if each["kind"].endswith("RoleBinding") for subject in each["subjects"]
    }
    for name, _, spec in pods(objects):
        assert spec["automountServiceAccountToken"] is (name.endswith(("-operator", "-router")) or "-epp-" in name)
        if spec["automountServiceAccountToken"]:
            assert spec["serviceAccountName"] in bound
            accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
            assert spec["serviceAccountName"] in {each["metadata"]["name"] for each in accounts}
        assert spec["enableServiceLinks"] is False


def selectors(objects: Sequence[Object]) -> Iterator[tuple[Object, Any]]:
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            yield each, spec["selector"]
        elif each["kind"] == "NetworkPolicy":
            yield each, spec["podSelector"]["matchLabels"]
        elif each["kind"] in {"Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"}:
            yield each, spec["selector"]["matchLabels"]


def test_selector_matches_pods_of_exactly_one_workload(objects: Sequence[Object]) -> None:
    for each, labels in selectors(objects):
        (name,) = selected(objects, labels)
        # The routers have a second Service, by which they find each other.
        assert each["metadata"]["name"].removesuffix("-peers") == name
    for _, labels, spec in pods(objects):
        for spread in spec.get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
            assert spread["matchLabelKeys"] == ["pod-template-hash"]
    for monitor in (each for each in objects if each["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            each for each in objects if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
        ]
        offered = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= offered


def test_ports_are_named_and_declared(objects: Sequence[Object]) -> None:
    for each, labels in selectors(objects):
        (spec,) = selected(objects, labels).values()
        has, asked = set(ports(spec)), set()
        if each["kind"] == "Service":
            asked = {port["targetPort"] for port in each["spec"]["ports"]}
            assert all(port["name"] for port in each["spec"]["ports"])
        elif each["kind"] == "NetworkPolicy":
            asked = {port["port"] for rule in each["spec"].get("ingress", ()) for port in rule["ports"]}
        elif each["kind"] == "PodMonitor":
            asked = {endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]}
        assert asked <= has
    for _, _, spec in pods(objects):
        for container in containers(spec):
            own = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for probe in (value for key, value in container.items() if key.endswith("Probe")):
                ((_, action),) = [(key, probe[key]) for key in ("httpGet", "tcpSocket", "grpc") if key in probe]
                assert action["port"] in {*own, *own.values()}
            for hook in container.get("lifecycle", {}).values():
                assert hook["httpGet"]["port"] in ports(spec).values()


def test_volumes_are_mounted_and_have_a_source(objects: Sequence[Object]) -> None:
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for _, _, spec in pods(objects):
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        mounts = [mount for container in containers(spec) for mount in container.get("volumeMounts", ())]
        assert {mount["name"] for mount in mounts} == set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                assert ("Secret", name) in made or name in SECRETS_OF_OTHERS


def arguments(objects: Sequence[Object]) -> Iterator[tuple[str, list[str]]]:
    """Yield (subcommand, arguments) of every container that runs `dualmap`."""
    for _, _, spec in pods(objects):
        for container in containers(spec):
            command = container["command"]
            if command[0] == "dualmap":
                yield command[1], container["args"]
            elif command[0] == "sh" and container["name"] != "recordings-key":
                (name,) = re.findall(r'^exec dualmap ([a-z-]+) "\$@" > /etc/envoy/envoy\.yaml$', command[2])
                assert command[3:] == [name]
                yield name, container["args"]


def test_chart_program_arguments_are_accepted(objects: Sequence[Object]) -> None:
    seen = set()
    for name, given in arguments(objects):
        seen.add(name)
        command = COMMANDS[name]
        context = click.Context(command, info_name=name)
        values, rest, _ = command.make_parser(context).parse_args(list(given))
        assert not rest
        for parameter in command.params:
            # The files exist only in the pod.
            if parameter.name in values and not isinstance(parameter.type, click.Path):
                parameter.type_cast_value(context, values[parameter.name])
    assert {"operator", "router"} <= seen or seen == {"epp"}


def test_pod_grace_period_exceeds_program_shutdown_time(objects: Sequence[Object]) -> None:
    for name, _, spec in pods(objects):
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
        command = "router" if name.endswith("-router") else "epp" if "-epp-" in name else None
        if command is not None:
            given = next(args for run, args in arguments(objects) if run == command)
            context = COMMANDS[command].make_context(command, [arg for arg in given if "/etc/dualmap" not in arg])
            assert grace_s >= context.params["drain_timeout"] + 10
        if name.endswith("-gateway"):
            (timeout,) = [arg for arg in template(spec, "drain")["args"] if arg.startswith("--timeout=")]
            assert grace_s >= float(timeout.removeprefix("--timeout=")) + 10


@pytest.mark.parametrize(("case", "kind", "where"), [("defaults", "Cluster", None), ("namespaced", "", "llm")])
def test_rbac_covers_the_configured_pool_namespaces(case: str, kind: str, where: str | None) -> None:
    objects = render(CASES[case])
    granted = {
        (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace"))
        for each in objects
        if "Role" in each["kind"]
    }
    assert granted == {
        (f"{form}Role{binding}", f"dualmap-{name}", namespace)
        for binding in ("", "Binding")
        for form, name, namespace in (
            (kind, "operator", where),
            (kind, "router", where),
            ("", "operator-system", NAMESPACE),
            *((("", f"{each}-models", NAMESPACE) for each in ("operator", "router")) if kind else ()),
        )
    }
    for each in objects:
        if each["kind"].endswith("RoleBinding"):
            assert each["roleRef"]["kind"] == each["kind"].removesuffix("Binding")
            assert each["roleRef"]["name"] == each["metadata"]["name"]
            (subject,) = each["subjects"]
            assert subject["name"] == each["metadata"]["name"].removesuffix("-system").removesuffix("-models")
            assert subject["namespace"] == NAMESPACE


def test_rbac_grants_only_rights_in_use(operated: Sequence[Object]) -> None:
    """The tests of manifests/rbac check the default permissions."""

    def granted(of: Sequence[Object]) -> set[str]:
        rules = (rule for each in of if each["kind"].endswith("Role") for rule in each["rules"])
        return {str(rule) for rule in rules if "secrets" not in rule["resources"]}

    (more,) = granted(render(CASES["openshift"])) - granted(render())
    assert "inferencepools/finalizers" in more
    # With watchNamespace, no model name is reserved.
    models = {each for each in granted(render()) if "dualmap-models" in each}
    assert len(models) == 2
    assert models.isdisjoint(granted(render(CASES["namespaced"])))
    assert granted(render()) - models <= granted(operated) <= granted(render()) | {more}


def test_rbac_on_secrets_names_the_generated_ones(operated: Sequence[Object]) -> None:
    """No other Secret can be read, and none can be created, listed or deleted."""
    generated = {
        (each["metadata"]["namespace"], each["metadata"]["name"])
        for each in operated
        if each["kind"] == "Secret" and "data" not in each
    }
    granted = set()
    for each in operated:
        for rule in each.get("rules", ()):
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["get", "patch"]
                granted |= {(each["metadata"]["namespace"], name) for name in rule["resourceNames"]}
    assert granted == generated
    (given,) = [args for command, args in arguments(operated) if command == "operator"]
    asked = {arg.rpartition("=")[2] for arg in given if arg.startswith("--generate=")}
    assert asked == {name if namespace == NAMESPACE else f"{namespace}/{name}" for namespace, name in generated}


@pytest.mark.parametrize("case", [case for case in ALL_CASES if "self-signed" not in case])
def test_render_has_no_secret_values(case: str) -> None:
    objects = render(ALL_CASES[case], apis=APIS)
    assert not [each for each in objects if each["kind"] == "Secret" and {"data", "stringData"} & set(each)]


@pytest.mark.parametrize("case", ["defaults", "gaie", "keda"])
def test_render_is_repeatable(case: str) -> None:
    """Tools that render the templates for each comparison find no difference."""
    assert text(ALL_CASES[case], apis=APIS) == text(ALL_CASES[case], apis=APIS)


@pytest.mark.parametrize("release", ["d" * 53, f"dualmap-{'d' * 45}"])
def test_object_names_leave_room_for_kubernetes_suffixes(release: str) -> None:
    """The chart has no StatefulSet, of whose name a label of each pod has a copy with a suffix."""
    for each in render(release=release):
        assert each["kind"] != "StatefulSet"
        assert len(each["metadata"]["name"]) <= 63


def pool_of(word: str) -> dict[str, Any]:
    return {"name": word, "namespace": word, "inferencePool": {"selector": {"app": word}}}


@pytest.mark.parametrize("word", ["123", "true", "0x10"])
def test_object_names_like_yaml_booleans_stay_strings(word: str) -> None:
    """A namespace's name may be a number, for example a team's number."""
    placed = {"priorityClassName": word, "topologySpread": {"topologyKeys": [word]}}
    pool = {"pool": word, "namespace": word, "maxReplicas": 2}
    keys = {"existingSecret": word, "passwordKey": word, "usernameKey": word, "caSecret": word, "caKey": word}
    values = {
        "fullnameOverride": "true",
        "image": {"pullSecrets": [word]},
        "watchNamespace": word,
        "operator": placed,
        "router": {**placed, "tls": {**SECRET_TLS, "secretName": word, "gatewaySecretName": word}},
        "gateway": {"bundled": placed},
        "redis": {"mode": "external", "external": {"url": "rediss://redis.cache:6380/0", **keys}},
        "monitoring": CASES["monitoring"]["monitoring"],
        "autoscaling": {"hpa": [pool], "keda": [{**pool, "pool": f"{word}0", "authentication": word}]},
        "test": {"model": "a: b", "url": "https://x: y"},
    }
    gaie = {
        "gateway": {"mode": "gaie", "gaie": {"pools": [pool_of(word)], "istio": {"destinationRule": True}}},
        "router": {**placed, "hashKey": {"secretName": word}, "tls": {"mode": "secret", "secretName": word}},
        "networkPolicy": {"gatewayFrom": GATEWAYS},
    }
    for given in (values, gaie):
        for each in render(given, apis=APIS, release=word if "fullnameOverride" in given else "a", namespace=word):
            assert isinstance(each["metadata"]["name"], str)
            assert each["kind"] in CLUSTER_WIDE or each["metadata"]["namespace"] == word
            if each["kind"] not in ELSEWHERE:
                assert complaints(each, KUBE_VERSION) == [], f"{each['kind']} {each['metadata']['name']}"


def test_object_names_contain_the_release_name() -> None:
    for release, prefix in (("dualmap", "dualmap"), ("my-dualmap", "my-dualmap"), ("prod", "prod-dualmap")):
        objects = render(release=release)
        workloads = {each["metadata"]["name"] for each in objects if each["kind"] in {"Deployment", "StatefulSet"}}
        assert workloads == {f"{prefix}-{each}" for each in ("operator", "router", "gateway", "redis")}
        given = dict(arguments(objects))
        assert f"--router-service={prefix}-router" in given["operator"]
        assert f"--router={prefix}-router.{NAMESPACE}:9002" in given["envoy-config"]
        assert f"--peer={prefix}-router-peers.{NAMESPACE}:9002" in given["router"]
        assert f"--redis=redis://{prefix}-redis.{NAMESPACE}.svc:6379/0" in given["router"]
