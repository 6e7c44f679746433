"""Tests of the chart's settings of TLS and Redis."""

import base64
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography import x509

from chart.cases import APIS, CASES
from chart.rendering import named, only, render
from chart.workloads import POD_NAMESPACE, container, workload


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
