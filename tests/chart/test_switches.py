"""Tests of the chart's settings: network policies, TLS, Redis, CRDs, monitoring, autoscalers, and the notes."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from chart.cases import APIS, CASES, GATEWAYS, HEADERS, PLACED, PLACED_ALONE, POOLS, RECORD, RENDERER, TOKENIZERS
from chart.objects import pods, ports
from chart.rendering import CHART, NAMESPACE, ROOT, Object, named, notes, only, render
from dualmap.objects.reservations import CONFIG_MAP, read_reservations
from dualmap_extproc.recording.folder import RecordingFolder

POD_NAMESPACE = {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
GOLDENS = Path(__file__).parent / "goldens"


def workload(objects: Sequence[Object], component: str) -> Object:
    return only(objects, "Deployment", f"dualmap-{component}")


def container(objects: Sequence[Object], component: str, name: str) -> Any:
    spec = workload(objects, component)["spec"]["template"]["spec"]
    (found,) = [each for each in (*spec.get("initContainers", ()), *spec["containers"]) if each["name"] == name]
    return found


@pytest.mark.parametrize(
    ("golden", "case", "wanted"),
    [
        ("network-policies", "defaults", [("NetworkPolicy", "dualmap-router"), ("NetworkPolicy", "dualmap-redis")]),
        ("keda", "keda over tls", [("ScaledObject", "qwen")]),
        ("certificates", "mutual tls by cert-manager", [("Certificate", "dualmap-router")]),
        ("monitors", "monitoring", [("ServiceMonitor", "dualmap-router"), ("PodMonitor", "dualmap-gateway")]),
    ],
)
def test_rendered_chart_equals_the_golden_files(golden: str, case: str, wanted: Sequence[tuple[str, str]]) -> None:
    objects = render(CASES[case], apis=APIS)
    shown = [only(objects, kind, name) for kind, name in wanted]
    assert shown == list(yaml.safe_load_all((GOLDENS / f"{golden}.yaml").read_text()))


def reached(objects: Sequence[Object], component: str) -> Iterator[tuple[str, str]]:
    """Yield (port, peer) for the allowed ingress of a component's pods; a peer is a component or a namespace."""
    policy = only(objects, "NetworkPolicy", f"dualmap-{component}")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    components = {tuple(sorted(labels.items())): name for name, labels, _ in pods(objects)}
    for rule in policy["spec"].get("ingress", ()):
        for port in rule["ports"]:
            if "from" not in rule:
                yield port["port"], "everybody"
            for peer in rule.get("from", ()):
                if "podSelector" in peer:
                    wanted = peer["podSelector"]["matchLabels"].items()
                    assert "namespaceSelector" not in peer
                    (name,) = [name for labels, name in components.items() if wanted <= set(labels)]
                    yield port["port"], name.removeprefix("dualmap-")
                else:
                    yield port["port"], peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]


def test_network_policies_never_limit_what_routers_reach() -> None:
    """The routers connect to engines at ports that only the engines know."""
    for case in CASES.values():
        policies = [each for each in render(case, apis=APIS) if each["kind"] == "NetworkPolicy"]
        assert all(each["spec"]["policyTypes"] == ["Ingress"] for each in policies)


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


def test_example_of_kv_events_admits_the_charts_pods_only() -> None:
    file = ROOT / "manifests" / "examples" / "kv-events.yaml"
    pool, _, policy = yaml.safe_load_all(file.read_text())
    events = pool["spec"]["engine"]["kvEvents"]
    components = {name.removeprefix("dualmap-"): labels for name, labels, _ in pods(render(apis=APIS))}
    admitted: dict[int, set[str]] = {}
    for rule in policy["spec"]["ingress"]:
        (peer,) = rule["from"]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
        labels = peer["podSelector"]["matchLabels"].items()
        (kinds,) = [each["values"] for each in peer["podSelector"].get("matchExpressions", ())] or [[]]
        names = {name for name, has in components.items() if labels <= has.items()}
        named = {name for name in names if not kinds or components[name]["app.kubernetes.io/component"] in kinds}
        for port in rule["ports"]:
            admitted[port["port"]] = named
    assert admitted == {
        8000: {"gateway", "router", "operator"},
        events["port"]: {"router"},
        events["replayPort"]: {"router"},
    }
    (listens,) = [each for each in engine_arguments(pool) if each.startswith("--kv-events-config=")]
    config = json.loads(listens.partition("=")[2])
    assert config["endpoint"] == f"tcp://*:{events['port']}"
    assert config["replay_endpoint"] == f"tcp://*:{events['replayPort']}"


def engine_arguments(pool: Any) -> list[str]:
    """Return the arguments of a pool's engine."""
    (engine,) = pool["spec"]["workload"]["template"]["spec"]["containers"]
    return list(engine["args"])


def test_network_policy_allows_only_required_peers() -> None:
    objects = render()
    assert set(reached(objects, "router")) == {
        ("grpc", "gateway"),
        ("als", "gateway"),
        ("grpc", "router"),
        ("grpc", "keda"),
        ("health", "keda"),
        ("metrics", "operator"),
        ("metrics", "monitoring"),
    }
    assert set(reached(objects, "operator")) == {("metrics", "monitoring")}
    assert set(reached(objects, "gateway")) == {("http", "everybody"), ("status", "monitoring")}
    assert set(reached(objects, "redis")) == {("redis", "router")}


def test_network_policy_admits_external_gateway_only_if_listed() -> None:
    objects = render({"gateway": {"mode": "none"}, "networkPolicy": {"gatewayFrom": GATEWAYS, "kedaFrom": []}})
    assert {each for each in reached(objects, "router") if each[0] in ("grpc", "als")} == {
        ("grpc", "gateways"),
        ("als", "gateways"),
        ("grpc", "router"),
    }
    nobody = render({"gateway": {"mode": "none"}, "networkPolicy": {"kedaFrom": [], "metricsFrom": []}})
    assert set(reached(nobody, "router")) == {("grpc", "router"), ("metrics", "operator")}
    assert set(reached(nobody, "operator")) == set()


def test_security_page_lists_every_chart_port() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    listed = {int(port) for row in rows for port in row.split(", ")}
    assert listed == {port for _, _, spec in pods(render()) for port in ports(spec).values()}


class TestTls:
    @pytest.mark.parametrize(
        "case", [case for case in CASES if "tls" in case and "keda" not in case and "off" not in case]
    )
    def test_tls_enabled_is_used_on_both_sides_with_renewed_files(self, case: str) -> None:
        objects = render(CASES[case], apis=APIS)
        mutual = "mutual" in case
        router, bootstrap = container(objects, "router", "router"), container(objects, "gateway", "bootstrap")
        assert "--tls=/etc/dualmap/tls" in router["args"]
        assert ("--tls-client-ca=/etc/dualmap/tls/ca.crt" in router["args"]) is mutual
        assert {"--tls=on", "--tls-ca=/etc/dualmap/tls/ca.crt", "--tls-sds=/etc/envoy"} <= set(bootstrap["args"])
        assert ("--tls-key=/etc/dualmap/tls/tls.key" in bootstrap["args"]) is mutual
        # The mount is a folder, because the kubelet never updates a mount of a single file.
        for each in (router, container(objects, "gateway", "envoy")):
            (mount,) = [mount for mount in each["volumeMounts"] if mount["name"] == "tls"]
            assert mount == {"name": "tls", "mountPath": "/etc/dualmap/tls", "readOnly": True}
        service = only(objects, "Service", "dualmap-router")
        protocols = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
        assert protocols == {"grpc": "http2", "als": "http2", "health": "kubernetes.io/h2c", "metrics": "http"}

    def test_tls_router_key_is_not_mounted_in_envoy(self) -> None:
        def secret(case: str, component: str) -> Any:
            pod = workload(render(CASES[case], apis=APIS), component)
            (volume,) = [each for each in pod["spec"]["template"]["spec"]["volumes"] if each["name"] == "tls"]
            return volume["secret"]

        assert secret("tls from a secret", "gateway") == {
            "secretName": "routers",
            "items": [{"key": "ca.crt", "path": "ca.crt"}],
        }
        assert secret("mutual tls from secrets", "gateway") == {"secretName": "envoys"}
        assert secret("mutual tls from secrets", "router") == {"secretName": "routers"}

    def test_tls_self_signed_certificates_share_a_ca(self) -> None:
        objects = render(CASES["self-signed tls"])
        secrets = {
            each["metadata"]["name"]: {key: base64.b64decode(value) for key, value in each["data"].items()}
            for each in objects
            if each["kind"] == "Secret" and "data" in each
        }
        assert set(secrets) == {"dualmap-router-tls", "dualmap-gateway-tls"}
        authority = x509.load_pem_x509_certificate(secrets["dualmap-router-tls"]["ca.crt"])
        for secret in secrets.values():
            assert secret["ca.crt"] == secrets["dualmap-router-tls"]["ca.crt"]
            certificate = x509.load_pem_x509_certificate(secret["tls.crt"])
            certificate.verify_directly_issued_by(authority)
            assert b"PRIVATE KEY" in secret["tls.key"]
        router = x509.load_pem_x509_certificate(secrets["dualmap-router-tls"]["tls.crt"])
        names = router.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert "dualmap-router.dualmap-system.svc" in names.get_values_for_type(x509.DNSName)

    @pytest.mark.parametrize("values", [{}, CASES["generated mutual tls"]])
    def test_tls_is_mutual_by_default_with_generated_secrets(self, values: Mapping[str, Any]) -> None:
        objects = render(values)
        assert named(objects, "Secret") == [
            "dualmap-authority",
            "dualmap-gateway-mtls",
            "dualmap-hash-key",
            "dualmap-redis-password",
            "dualmap-router-mtls",
        ]
        assert "--tls-client-ca=/etc/dualmap/tls/ca.crt" in container(objects, "router", "router")["args"]
        assert "--tls-cert=/etc/dualmap/tls/tls.crt" in container(objects, "gateway", "bootstrap")["args"]
        files = [{"key": key, "path": key} for key in ("ca.crt", "tls.crt", "tls.key")]
        for component in ("router", "gateway"):
            spec = workload(objects, component)["spec"]["template"]["spec"]
            # Named files: the pod waits until the operator has generated them.
            assert {"name": "tls", "secret": {"secretName": f"dualmap-{component}-mtls", "items": files}} in (
                spec["volumes"]
            )

    def test_tls_with_another_envoy_is_plain_text_by_default(self) -> None:
        objects = render(CASES["no gateway"], apis=APIS)
        assert named(objects, "Secret") == ["dualmap-hash-key", "dualmap-redis-password"]
        assert not [arg for arg in container(objects, "router", "router")["args"] if "tls" in arg]

    def test_tls_disabled_uses_plain_text(self) -> None:
        objects = render(CASES["tls off"])
        assert named(objects, "Secret") == ["dualmap-hash-key", "dualmap-redis-password"]
        assert not [arg for arg in container(objects, "router", "router")["args"] if "tls" in arg]
        assert not [arg for arg in container(objects, "gateway", "bootstrap")["args"] if "tls" in arg]


class TestRedis:
    def test_redis_bundled_requires_the_generated_password(self) -> None:
        objects = render()
        redis = workload(objects, "redis")["spec"]["template"]["spec"]
        (server,) = redis["containers"]
        assert server["args"][0] == "/etc/dualmap/redis/redis.conf"
        assert "--protected-mode" not in server["args"]
        assert redis["volumes"][0]["secret"] == {
            "secretName": "dualmap-redis-password",
            "items": [{"key": "redis.conf", "path": "redis.conf"}],
        }
        router = workload(objects, "router")["spec"]["template"]["spec"]
        assert "--redis-password-file=/etc/dualmap/redis/password" in router["containers"][0]["args"]
        secret = {"secretName": "dualmap-redis-password", "items": [{"key": "password", "path": "password"}]}
        assert {"name": "redis", "secret": secret} in router["volumes"]

    def test_redis_external_credentials_come_from_a_secret(self) -> None:
        objects = render(CASES["redis elsewhere, with everything"])
        router = container(objects, "router", "router")
        assert {
            "--redis=rediss://$(REDIS_USERNAME)@redis.cache:6380/0",
            "--redis-password-file=/etc/dualmap/redis/password",
            "--redis-ca=/etc/dualmap/redis-ca/ca.crt",
        } <= set(router["args"])
        assert router["env"] == [
            POD_NAMESPACE,
            {"name": "REDIS_USERNAME", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "user"}}},
        ]
        assert "dualmap-redis" not in named(objects, "Deployment")

    def test_redis_disabled_adds_no_router_arguments(self) -> None:
        objects = render(CASES["no redis"])
        assert not [arg for arg in container(objects, "router", "router")["args"] if "redis" in arg]
        assert not [each["metadata"]["name"] for each in objects if "redis" in each["metadata"]["name"]]


class TestPlacement:
    @pytest.mark.parametrize("component", ["operator", "router", "gateway", "redis"])
    def test_node_placement_values_apply_to_every_component(self, component: str) -> None:
        template = workload(render(CASES["placed"]), component)["spec"]["template"]
        assert PLACED_ALONE.items() <= template["spec"].items()
        if component != "redis":
            (spread,) = template["spec"]["topologySpreadConstraints"]
            assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
                "topology.kubernetes.io/zone",
                "DoNotSchedule",
            )
            assert template["metadata"]["annotations"].items() >= PLACED["podAnnotations"].items()

    def test_helm_test_pod_has_the_node_placement_of_routers(self) -> None:
        spec = only(render(CASES["placed"]), "Pod", "dualmap-test")["spec"]
        assert (spec["nodeSelector"], spec["tolerations"]) == (PLACED["nodeSelector"], PLACED["tolerations"])
        # The routers' affinity must not apply to the test's pod.
        assert "affinity" not in spec


def test_envoy_probe_grace_period_is_10_s_and_pod_name_is_set() -> None:
    envoy = container(render(), "gateway", "envoy")
    for probe in ("startupProbe", "livenessProbe"):
        assert envoy[probe]["terminationGracePeriodSeconds"] == 10
    assert envoy["args"][-2:] == ["--service-node", "$(POD_NAME)"]
    assert envoy["env"] == [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]


@pytest.mark.parametrize(("values", "name"), [({}, "dualmap-hash-key"), (CASES["hash key from a secret"], "hashes")])
def test_hash_key_secret_is_mounted_and_given_to_the_routers(values: Mapping[str, Any], name: str) -> None:
    objects = render(values)
    assert ("dualmap-hash-key" in named(objects, "Secret")) == (name == "dualmap-hash-key")
    router = container(objects, "router", "router")
    assert "--hash-key-file=/etc/dualmap/hash-key/key" in router["args"]
    assert {"name": "hash-key", "mountPath": "/etc/dualmap/hash-key", "readOnly": True} in router["volumeMounts"]
    volumes = workload(objects, "router")["spec"]["template"]["spec"]["volumes"]
    secret = {"secretName": name, "items": [{"key": "key", "path": "key"}]}
    assert {"name": "hash-key", "secret": secret} in volumes


def test_router_env_has_extra_and_redis_variables() -> None:
    assert container(render(CASES["routers' switches"]), "router", "router")["env"] == [POD_NAMESPACE, HEADERS]
    both = {**CASES["redis elsewhere, with everything"], "router": {"extraEnv": [HEADERS]}}
    assert [each["name"] for each in container(render(both), "router", "router")["env"]] == [
        "POD_NAMESPACE",
        "REDIS_USERNAME",
        HEADERS["name"],
    ]


def test_tokenizers_are_mounted_at_the_path_of_pools() -> None:
    objects = render(CASES["renderers"])
    expected = [
        {
            "name": "tokenizer-qwen",
            "mountPath": "/etc/dualmap/tokenizers/qwen",
            "subPath": "Qwen3-8B",
            "readOnly": True,
        },
        {"name": "tokenizer-llama", "mountPath": "/etc/dualmap/tokenizers/llama", "readOnly": True},
    ]
    for name in ("router", "renderer-qwen", "renderer-2"):
        mounts = container(objects, "router", name)["volumeMounts"]
        assert [each for each in mounts if each["name"].startswith("tokenizer-")] == expected
    volumes = workload(objects, "router")["spec"]["template"]["spec"]["volumes"]
    assert [each for each in volumes if each["name"].startswith("tokenizer-")] == [
        {"name": f"tokenizer-{each['name']}", **each["volume"]} for each in TOKENIZERS
    ]


def test_recording_is_off_by_default() -> None:
    made = container(render(CASES["defaults"]), "router", "router")
    assert not [each for each in made["args"] if each.startswith("--record")]


@pytest.mark.parametrize(
    ("case", "volume", "options"),
    [
        ("recording", {"emptyDir": {}}, ["--record-sample=1", "--record-max=10GB"]),
        ("recording with a common key", RECORD["volume"], ["--record-sample=0.1", "--record-max=2GB"]),
    ],
)
def test_recording_has_a_folder_for_each_pod(case: str, volume: Mapping[str, Any], options: list[str]) -> None:
    objects = render(CASES[case])
    made, spec = container(objects, "router", "router"), workload(objects, "router")["spec"]["template"]["spec"]
    folder = "/var/lib/dualmap/recordings"
    assert [each for each in made["args"] if each.startswith("--record")] == [
        f"--record={folder}/$(POD_NAME)",
        *options,
    ]
    assert {"name": "recordings", "mountPath": folder} in made["volumeMounts"]
    assert {"name": "recordings", **volume} in spec["volumes"]
    (name,) = (each for each in made["env"] if each["name"] == "POD_NAME")
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_recording_with_a_common_key_puts_it_into_the_folder_of_the_pod(tmp_path: Path) -> None:
    spec = workload(render(CASES["recording with a common key"]), "router")["spec"]["template"]["spec"]
    (init,) = spec["initContainers"]
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    script = init["command"][2].replace("/etc/dualmap/recordings-key/key", str(secret))
    folder = tmp_path / "router-0"
    for _ in range(2):
        subprocess.run(["sh", "-c", script, "recordings-key", str(folder)], check=True)
        opened = RecordingFolder(folder)
        assert opened.open() == bytes(32)
        opened.close()
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    mounts = {each["name"]: each["mountPath"] for each in init["volumeMounts"]}
    assert mounts == {"recordings": "/var/lib/dualmap/recordings", "recordings-key": "/etc/dualmap/recordings-key"}


def test_renderer_runs_its_command_beside_the_router() -> None:
    objects = render(CASES["renderers"])
    for name, memory in (("renderer-qwen", "512Mi"), ("renderer-2", "1Gi")):
        made = container(objects, "router", name)
        assert {key: made[key] for key in ("image", "command", "args")} == {
            key: RENDERER[key] for key in ("image", "command", "args")
        }
        assert made["resources"]["requests"]["memory"] == memory
    assert "volumeMounts" not in container(render({"router": {"renderers": [RENDERER]}}), "router", "renderer-qwen")


class TestOpenShift:
    @pytest.mark.parametrize(("case", "user"), [("defaults", 65532), ("run by another user", 1000650000)])
    def test_pod_runs_as_the_configured_user(self, case: str, user: int) -> None:
        for _, _, spec in pods(render(CASES[case])):
            assert {spec["securityContext"].get(key) for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}

    def test_pod_user_null_omits_the_user_from_the_pod(self) -> None:
        for _, _, spec in pods(render(CASES["openshift"])):
            assert set(spec["securityContext"]) == {"runAsNonRoot", "seccompProfile"}

    @pytest.mark.parametrize(("case", "granted"), [("defaults", False), ("openshift", True)])
    def test_openshift_finalizers_permission_is_optional(self, case: str, granted: bool) -> None:
        rules = only(render(CASES[case]), "ClusterRole", "dualmap-operator")["rules"]
        wanted = {
            "apiGroups": ["serving.dualmap.dev"],
            "resources": ["inferencepools/finalizers"],
            "verbs": ["update"],
        }
        assert (wanted in rules) is granted


class TestModels:
    def test_models_value_is_written_as_the_router_reads_it(self) -> None:
        models = {"gpt-prod": "prod", "Qwen/Qwen2.5-7B": "llm", "other": "prod"}
        made = only(render({"models": models}), "ConfigMap", CONFIG_MAP)
        assert made["metadata"]["namespace"] == NAMESPACE
        assert read_reservations(made["data"]) == models

    def test_models_config_map_has_no_data_of_its_own(self) -> None:
        """The operator's data then survives upgrades."""
        assert "data" not in only(render(), "ConfigMap", CONFIG_MAP)

    def test_models_are_not_reserved_with_one_namespace(self) -> None:
        assert CONFIG_MAP not in named(render(CASES["namespaced"]), "ConfigMap")


class TestAdmissionPolicy:
    def test_admission_policy_can_be_disabled(self) -> None:
        objects = render({"admissionPolicy": {"enabled": False}})
        assert not [each for each in objects if each["kind"].startswith("ValidatingAdmissionPolicy")]

    @pytest.mark.parametrize("case", ["defaults", "namespaced"])
    def test_admission_policy_applies_to_the_watched_namespaces(self, case: str) -> None:
        objects = render(CASES[case])
        (binding,) = [each for each in objects if each["kind"] == "ValidatingAdmissionPolicyBinding"]
        (policy,) = [each for each in objects if each["kind"] == "ValidatingAdmissionPolicy"]
        assert binding["spec"]["policyName"] == policy["metadata"]["name"]
        labels = {"kubernetes.io/metadata.name": CASES[case].get("watchNamespace")}
        watched = {"matchResources": {"namespaceSelector": {"matchLabels": labels}}} if case == "namespaced" else {}
        assert binding["spec"] == {
            "policyName": policy["metadata"]["name"],
            "validationActions": ["Deny"],
            **watched,
        }


class TestCrds:
    def test_crds_equal_the_manifests(self) -> None:
        (file,) = (ROOT / "crds").glob("*.yaml")
        wanted = yaml.safe_load(file.read_text())
        kept = only(render(), "CustomResourceDefinition", wanted["metadata"]["name"])
        assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert kept == wanted
        assert only(render(CASES["crds that go"]), "CustomResourceDefinition", wanted["metadata"]["name"]) == wanted

    def test_crds_can_be_disabled(self) -> None:
        assert not named(render(CASES["crds kept elsewhere"]), "CustomResourceDefinition")


class TestMonitoring:
    def test_monitoring_rules_and_dashboard_equal_their_source_files(self) -> None:
        objects = render(CASES["monitoring"], apis=APIS)
        rules = only(objects, "PrometheusRule", "dualmap")
        assert rules["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
        assert rules["metadata"]["labels"]["release"] == "prometheus"
        dashboard = only(objects, "ConfigMap", "dualmap-dashboard")
        assert json.loads(dashboard["data"]["dualmap.json"]) == json.loads(
            (CHART / "files" / "dashboard.json").read_text()
        )
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"

    def test_monitoring_is_off_by_default(self) -> None:
        kinds = {each["kind"] for each in render(apis=APIS)}
        assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HorizontalPodAutoscaler"}


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


def test_bundled_gateway_gets_its_paths_and_memory_limit() -> None:
    for case, memory, paths in ("defaults", "1Gi", []), ("gateway", "2Gi", ["/detokenize", "*"]):
        bootstrap = container(render(CASES[case]), "gateway", "bootstrap")
        assert bootstrap["env"] == [{"name": "DUALMAP_ENVOY_MEMORY", "value": memory}]
        assert [arg for arg in bootstrap["args"] if "path" in arg] == [f"--allow-path={path}" for path in paths]
    unlimited = render({"gateway": {"bundled": {"resources": {"limits": None}}}})
    assert "env" not in container(unlimited, "gateway", "bootstrap")


class TestHelmTestHook:
    def test_helm_test_pod_calls_the_gateway_with_the_dualmap_image(self) -> None:
        objects = render(CASES["test of a model"])
        pod = only(objects, "Pod", "dualmap-test")
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        (chat,) = pod["spec"]["containers"]
        assert chat["image"] == container(objects, "router", "router")["image"]
        assert chat["args"] == ["--url=http://dualmap-gateway.dualmap-system.svc:80", "--model=qwen", "--timeout=180"]

    @pytest.mark.parametrize("values", [CASES["no test"], {"gateway": {"mode": "none"}}])
    def test_helm_test_pod_is_omitted_if_gateway_is_disabled(self, values: Mapping[str, Any]) -> None:
        assert not named(render(values), "Pod")


def test_scripts_in_config_maps_equal_the_script_files() -> None:
    objects = render()
    for name, file in (("dualmap-gateway-scripts", "envoy_drain.py"), ("dualmap-test", "chat_request.py")):
        assert only(objects, "ConfigMap", name)["data"] == {file: (CHART / "files" / file).read_text()}


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
