"""Tests that kopf logs in with the connection settings of the operator's client."""

import base64
import json
from pathlib import Path

import kopf
import kubernetes.aio.config as kube_config
import pytest
from kubernetes.aio.config import incluster_config

from certificates import Authority, write_pair
from controlplane.fake_kube import Clock
from dualmap_edge.kube.client import KubeClient
from dualmap_operator.run.handlers import make_registry, make_settings
from dualmap_operator.run.reconciler import Reconcilers


async def login(client: KubeClient) -> kopf.ConnectionInfo:
    """Return the result of kopf's login handler."""
    registry = make_registry(Reconcilers(lambda *_: None), Clock(), connection=client.connection)  # type: ignore[arg-type,return-value]  # unused
    (handler,) = registry._activities.get_all_handlers()
    info = await handler.fn(settings=make_settings(), logger=None)  # type: ignore[call-arg]
    assert isinstance(info, kopf.ConnectionInfo)
    return info


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the files and variables of a pod's service account; return the token's file."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_bytes(Authority().pem)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / ".kube" / "config"))
    return token


async def test_login_in_a_pod_uses_the_service_ip_not_dns(pod: Path) -> None:
    client = await KubeClient.connect()
    try:
        info = await login(client)
        assert info.server == client.server == "https://[fd00::1]:443"
        assert info.ca_path == str(pod.parent / "ca.crt")
        assert info.as_http_headers() == {"Authorization": "bearer first"}
    finally:
        await client.close()


async def test_repeated_login_reads_the_token_file_again(pod: Path) -> None:
    client = await KubeClient.connect()
    try:
        await login(client)
        pod.write_text("second\n")  # noqa: ASYNC240  # a small file
        assert (await login(client)).as_http_headers() == {"Authorization": "bearer second"}
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, {"Authorization": "Bearer t"}),
        ({"username": "u", "password": "p"}, {"Authorization": "Basic " + base64.b64encode(b"u:p").decode()}),
        ({}, {}),
    ],
)
async def test_login_with_a_kubeconfig_uses_its_server_and_user(
    tmp_path: Path, user: dict[str, str], header: dict[str, str]
) -> None:
    authority = Authority()
    pair = write_pair(tmp_path / "tls", authority.pair())
    cluster = {
        "server": "https://127.0.0.1:6443",
        "certificate-authority-data": base64.b64encode(authority.pem).decode(),
        "proxy-url": "http://proxy:3128",
    }
    certificate = {"client-certificate": str(pair / "tls.crt"), "client-key": str(pair / "tls.key")}
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": "me", "user": {**certificate, **user}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    client = await KubeClient.connect(tmp_path / "kubeconfig")
    try:
        info = await login(client)
        assert (info.server, info.proxy_url, info.insecure) == ("https://127.0.0.1:6443", "http://proxy:3128", False)
        assert info.as_http_headers() == header
        assert Path(str(info.ca_path)).read_bytes() == authority.pem  # noqa: ASYNC240  # a small file
        assert (info.certificate_path, info.private_key_path) == (str(pair / "tls.crt"), str(pair / "tls.key"))
        info.as_ssl_context()
    finally:
        await client.close()
