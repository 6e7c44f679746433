"""Tests that values.yaml, its schema and the README's table agree, and that helm rejects wrong values with a helpful
message.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from chart.cases import APIS, POOLS, RENDERER
from chart.rendering import CHART, NAMESPACE, ROOT, helm, refused

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# These objects are in the release's namespace.
UNPLACED = {"pool": "a", "maxReplicas": 4}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def levels(schema: Any, path: str = "values") -> Iterator[tuple[str, Any]]:
    """Yield this schema and the schemas of all nested values, with their paths."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from levels(each, f"{path}.{name}")
    if "items" in schema:
        yield from levels(schema["items"], f"{path}[]")


def keys(values: Any, path: str = "") -> Iterator[str]:
    for name, each in values.items():
        yield f"{path}{name}"
        if isinstance(each, Mapping):
            yield from keys(each, f"{path}{name}.")


def schema_keys(schema: Any, path: str = "") -> Iterator[str]:
    for name, each in schema["properties"].items():
        yield f"{path}{name}"
        if "properties" in each:
            yield from schema_keys(each, f"{path}{name}.")


def test_every_value_has_a_default_and_a_schema() -> None:
    # Values such as labels and resources have free content.
    free = [path for path, each in levels(SCHEMA) if each.get("type") == "object" and "properties" not in each]
    given = {key for key in keys(VALUES) if not any(f"values.{key}".startswith(f"{path}.") for path in free)}
    assert given == set(schema_keys(SCHEMA)) - {"global"}


def test_schema_describes_every_value_and_allows_no_other() -> None:
    for path, each in levels(SCHEMA):
        if "properties" in each:
            assert each["additionalProperties"] is False, path
        if path != "values" and "[]" not in path.rpartition(".")[2]:
            assert each["description"].endswith("."), path


def test_schema_requires_every_value_that_is_not_optional() -> None:
    """helm treats null as unset, so a template would fail or lack the value."""
    may_be_left_out = {"values": {"global"}, "values.podSecurity": {"runAsUser"}}
    for path, each in levels(SCHEMA):
        if "properties" in each and "[]" not in path:
            wanted = set(each["properties"]) - may_be_left_out.get(path, set())
            assert set(each.get("required", ())) == wanted, path


def test_generated_chart_files_are_up_to_date() -> None:
    """The generated files are the README's table, the chart's CRD, and manifests/install*.yaml."""
    helm()
    done = subprocess.run([sys.executable, ROOT / "helm" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_chart_has_the_package_version_and_passes_strict_lint() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'\nversion = "{chart["appVersion"]}"\n' in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run([helm(), "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``value`` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    "path", ["router", "router.tls", "router.replicas", "redis.mode", "image.registry", "networkPolicy.enabled"]
)
def test_null_value_is_rejected_with_its_name(path: str) -> None:
    message = refused(nested(path, None))
    assert "values don't meet the specifications of the schema" in message
    assert path.rpartition(".")[2] in message


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("routers", {}, "routers"),
        ("router.replica", 3, "replica"),
        ("router.replicas", "3", "router.replicas"),
        ("router.replicas", 0, "router.replicas"),
        ("router.drainTimeout", "soon", "router.drainTimeout"),
        ("router.logLevel", "loud", "router.logLevel"),
        ("router.tls.mode", "on", "selfSigned"),
        ("router.tokenizers", [{"name": "a/b", "volume": {"emptyDir": {}}}], "router.tokenizers.0.name"),
        ("router.tokenizers", [{"name": "a", "volume": {}}], "router.tokenizers.0.volume"),
        ("router.renderers", [{**RENDERER, "image": "vllm"}], "router.renderers.0.image"),
        ("router.renderers", [{"name": "a"}], "command"),
        ("router.record.sample", 0, "router.record.sample"),
        ("router.record.sample", 1.5, "router.record.sample"),
        ("router.record.max", "all", "router.record.max"),
        ("router.record.volume", {"emptyDir": {}, "hostPath": {}}, "router.record.volume"),
        ("gateway.mode", "nginx", "bundled"),
        ("gateway.bundled.service.port", 70000, "gateway.bundled.service.port"),
        ("gateway.gaie.pools", [{"name": "Not A Name"}], "gateway.gaie.pools.0.name"),
        ("gateway.gaie.pools", [{"name": "a", "port": 8000}], "port"),
        ("gateway.gaie.pools", [{"name": "a", "settings": {"policy": "dualmap"}}], "policy"),
        ("gateway.gaie.pools", [{"name": "a", "inferencePool": {}}], "selector"),
        ("image.digest", "sha256:12", "image.digest"),
        ("models", {"gpt": "Prod"}, "models.gpt"),
        ("models", {" gpt": "prod"}, "models"),
        ("image.registry", "https://registry.example.com", "image.registry"),
        ("gateway.bundled.image.repository", "envoy proxy/Envoy", "gateway.bundled.image.repository"),
        ("redis.external.passwordKey", "a: b", "redis.external.passwordKey"),
        ("router.topologySpread.topologyKeys", ["a: b"], "router.topologySpread.topologyKeys.0"),
        ("fullnameOverride", "a.b", "fullnameOverride"),
        ("fullnameOverride", "1st", "fullnameOverride"),
        ("redis.external.url", "redis.cache:6379", "redis.external.url"),
        ("networkPolicy.metricsFrom", [{"namespace": "monitoring"}], "networkPolicy.metricsFrom.0"),
        ("autoscaling.keda", [{"pool": "qwen"}], "maxReplicas"),
        ("watchNamespace", "llm,chat", "watchNamespace"),
    ],
)
def test_schema_rejects_unknown_values_by_name(path: str, value: Any, said: str) -> None:
    message = refused(nested(path, value))
    assert "values don't meet the specifications of the schema" in message
    assert said in message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"tag": "latest"}}, "image.tag: latest is not accepted"),
        ({"models": {"gpt": "prod"}, "watchNamespace": "llm"}, "remove models or watchNamespace"),
        ({"redis": {"bundled": {"image": {"tag": ""}}}}, "redis.bundled.image: set a tag or a digest"),
        (
            {"router": {"tls": {"mode": "secret"}}},
            "set router.tls.secretName to the Secret with ca.crt, tls.crt and tls.key",
        ),
        ({"router": {"tls": {"mode": "certManager"}}}, "set router.tls.issuerRef.name to the issuer"),
        ({"router": {"tls": {"mode": "none", "mutual": True}}}, "router.tls.mutual: requires TLS"),
        (
            {"router": {"tls": {"mode": "secret", "secretName": "dualmap-router-mtls"}}},
            "use Secrets with other names",
        ),
        (
            {"router": {"tls": {"mode": "secret", "secretName": "a", "mutual": True}}},
            "set router.tls.gatewaySecretName to the Secret with Envoy's certificate",
        ),
        ({"redis": {"mode": "external"}}, "set redis.external.url to the server"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://u:secret@h:6379"}}},
            "store it in a Secret and set redis.external.existingSecret",
        ),
        *(
            (
                {"redis": {"mode": "external", "external": {"url": url}}},
                "store it in a Secret and set redis.external.existingSecret",
            )
            for url in ("redis://:p/w@h", "redis://h:6379/0?password=s3cret")
        ),
        *(
            ({"redis": {"mode": "external", "external": {"url": url}}}, "use redis://[USER@]HOST[:PORT][/DATABASE]")
            for url in ("redis://h:notaport/x", "redis://a b:1", "redis://h/x")
        ),
        ({"router": {"drainTimeout": "999999h"}}, "router.drainTimeout: 999999h is not accepted; the maximum is 1h"),
        ({"gateway": {"bundled": {"longestWait": "61m"}}}, "gateway.bundled.longestWait: 61m is not accepted"),
        ({"router": {"otlp": {"endpoint": "http://x y:1"}}}, "use http://HOST:PORT"),
        (
            {"router": {"tls": {"mode": "secret", "secretName": "dualmap-router-tls"}}},
            "use Secrets with other names",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://h", "usernameKey": "u"}}},
            "set redis.external.existingSecret to the Secret that has the key",
        ),
        (
            {
                "redis": {
                    "mode": "external",
                    "external": {"url": "redis://me@h", "usernameKey": "u", "existingSecret": "s"},
                }
            },
            "in usernameKey or in the url, not in both",
        ),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://h", "caSecret": "s"}}},
            "use a rediss:// url",
        ),
        (
            {"autoscaling": {"hpa": [{**POOLS[0], "minReplicas": 20}]}},
            "pool qwen: minReplicas 20 is greater than maxReplicas 16",
        ),
        (
            {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "router.autoscaling: minReplicas 9 is greater than maxReplicas 8",
        ),
        (
            {"router": {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}}},
            "set router.resources.requests.cpu",
        ),
        (
            {
                "router": {"replicas": 1, "autoscaling": {"enabled": True}},
                "redis": {"mode": "none"},
                "autoscaling": {"keda": POOLS},
            },
            "autoscaling.keda with redis.mode=none",
        ),
        ({"autoscaling": {"hpa": POOLS, "keda": POOLS}}, "pool llm/qwen is listed under hpa and keda"),
        (
            {"autoscaling": {"hpa": [{"pool": "a", "namespace": NAMESPACE, "maxReplicas": 2}], "keda": [UNPLACED]}},
            f"pool {NAMESPACE}/a is listed under hpa and keda",
        ),
        *(
            (
                {"watchNamespace": "llm", "autoscaling": {form: [UNPLACED]}},
                f"autoscaling.{form}: pool {NAMESPACE}/a is not watched, because watchNamespace is llm",
            )
            for form in ("hpa", "keda")
        ),
        ({"autoscaling": {"keda": [UNPLACED, UNPLACED]}}, f"pool {NAMESPACE}/a is listed under keda twice"),
        (
            {"autoscaling": {"keda": POOLS}, "redis": {"mode": "none"}},
            "set redis.mode to bundled or external, or router.replicas to 1",
        ),
    ],
)
def test_conflicting_values_are_rejected_with_a_remedy(values: Mapping[str, Any], said: str) -> None:
    assert said in refused(values, apis=APIS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (nested("monitoring.serviceMonitor.enabled", True), "monitoring.coreos.com/v1/ServiceMonitor"),
        (nested("monitoring.podMonitor.enabled", True), "monitoring.coreos.com/v1/PodMonitor"),
        (nested("monitoring.prometheusRule.enabled", True), "monitoring.coreos.com/v1/PrometheusRule"),
        (nested("router.tls", {"mode": "certManager", "issuerRef": {"name": "i"}}), "cert-manager.io/v1/Certificate"),
        (nested("autoscaling.keda", POOLS), "keda.sh/v1alpha1/ScaledObject"),
    ],
)
def test_option_without_required_cluster_api_is_rejected_by_name(values: Mapping[str, Any], said: str) -> None:
    message = refused(values)
    assert f"this cluster does not serve {said}. Install" in message


def test_too_old_kubernetes_version_is_rejected() -> None:
    assert "kubeVersion: >=1.32.0-0" in refused({}, kube_version="1.31.9")


@pytest.mark.parametrize(
    ("value", "given", "said"),
    [
        ("tokenizers", [{"name": "a", "volume": {"emptyDir": {}}}] * 2, "two entries have the name a"),
        ("renderers", [RENDERER, RENDERER], "two entries have the name qwen"),
        ("renderers", [{**RENDERER, "image": "vllm:latest"}], "set a version or a digest"),
    ],
)
def test_tokenizers_and_renderers_that_contradict_are_rejected(value: str, given: Any, said: str) -> None:
    message = refused({"router": {value: given}})
    assert f"router.{value}" in message
    assert said in message
