"""Tests of the chart's other settings: placement, mounted files, recordings, CRDs, monitoring, and the test hook."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.cases import APIS, CASES, HEADERS, PLACED, PLACED_ALONE, RECORD, RENDERER, TOKENIZERS
from chart.objects import pods
from chart.rendering import CHART, NAMESPACE, ROOT, named, only, render
from chart.workloads import POD_NAMESPACE, container, workload
from dualmap.objects.reservations import CONFIG_MAP, read_reservations
from dualmap_extproc.recording.folder import RecordingFolder

GOLDENS = Path(__file__).parent / "goldens"


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
