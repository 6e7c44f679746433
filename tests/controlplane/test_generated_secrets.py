"""The operator's loop over the Secrets that it generates: order, exact requests, conflicts and failures."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.fake_kube import Counts, FakeKube, Request
from dualmap_edge.kube.client import KubeError
from dualmap_operator.api import Api
from dualmap_operator.run.generated_secrets import GeneratedSecrets
from dualmap_operator.settings import GeneratedSecret, SecretKind

SECRETS = (
    GeneratedSecret(kind=SecretKind.SERVER, name="router"),
    GeneratedSecret(kind=SecretKind.CLIENT, name="keda-client", namespace="keda"),
    GeneratedSecret(kind=SecretKind.REDIS, name="redis"),
    GeneratedSecret(kind=SecretKind.AUTHORITY, name="authority"),
)
PATHS = {
    "router": "/api/v1/namespaces/system/secrets/router",
    "keda-client": "/api/v1/namespaces/keda/secrets/keda-client",
    "redis": "/api/v1/namespaces/system/secrets/redis",
    "authority": "/api/v1/namespaces/system/secrets/authority",
}


class Scene:
    """An API server with the empty Secrets of the chart."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.leads = True
        self.now = datetime.now(UTC)
        self.data: dict[str, dict[str, str]] = {name: {} for name in PATHS}
        self.secrets = GeneratedSecrets(
            Api(self.kube, Counts(), lambda: self.leads),  # type: ignore[arg-type]  # stands for it
            SECRETS,
            namespace="system",
            server="dualmap-router",
            now=lambda: self.now,
        )
        for path in PATHS.values():
            self.kube.answer("GET", path, lambda request: self.read(request))
            self.kube.answer("PATCH", path, lambda request: self.patch(request))

    def read(self, request: Request) -> dict[str, Any]:
        name = request.path.rpartition("/")[2]
        # The API server leaves out empty data.
        return {"metadata": {"resourceVersion": "7"}} | ({"data": self.data[name]} if self.data[name] else {})

    def patch(self, request: Request) -> dict[str, Any]:
        name = request.path.rpartition("/")[2]
        self.data[name] |= request.body["data"]
        return {}

    def written(self) -> list[str]:
        names = [each.path.rpartition("/")[2] for each in self.kube.requests if each.method == "PATCH"]
        self.kube.requests.clear()
        return names


async def test_secrets_are_filled_once_authority_first() -> None:
    scene = Scene()
    assert await scene.secrets.check()
    patches = [each for each in scene.kube.requests if each.method == "PATCH"]
    assert patches[0].content_type == "application/merge-patch+json"
    assert patches[0].query == {"fieldManager": "dualmap-operator"}
    # The write is refused if another client was faster.
    assert {each.body["metadata"]["resourceVersion"] for each in patches} == {"7"}
    assert scene.written() == ["authority", "router", "keda-client", "redis"]
    assert set(scene.data["redis"]) == {"password", "redis.conf"}
    assert scene.data["router"]["ca.crt"] == scene.data["keda-client"]["ca.crt"] == scene.data["authority"]["tls.crt"]

    before = json.dumps(scene.data)
    assert await scene.secrets.check()
    assert (scene.written(), json.dumps(scene.data)) == ([], before)


async def test_certificates_are_renewed_in_time_and_the_rest_is_kept() -> None:
    scene = Scene()
    await scene.secrets.check()
    scene.written()
    scene.now += timedelta(days=366)
    assert await scene.secrets.check()
    assert scene.written() == ["router", "keda-client"]


async def test_emptied_secret_gets_new_content() -> None:
    scene = Scene()
    await scene.secrets.check()
    scene.written()
    scene.data["authority"] = {}
    assert await scene.secrets.check()
    assert scene.written() == ["authority", "router", "keda-client"]


async def test_secret_failure_is_logged_once_and_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.kube.answer_instead("GET", PATHS["keda-client"], KubeError(404, 'secrets "keda-client" not found'))
    assert not await scene.secrets.check()
    assert not await scene.secrets.check()
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
        "Generating Secret content failed, retrying"
    ]
    assert scene.written() == ["authority", "router", "redis"]


async def test_missing_authority_leaves_certificates_alone() -> None:
    scene = Scene()
    scene.kube.answer_instead("GET", PATHS["authority"], KubeError(403, "forbidden"))
    assert not await scene.secrets.check()
    assert scene.written() == ["redis"]


async def test_secret_conflict_is_tried_again() -> None:
    scene = Scene()
    scene.kube.answer_instead("PATCH", PATHS["redis"], KubeError(409, "modified"), lambda request: scene.patch(request))
    assert not await scene.secrets.check()
    assert await scene.secrets.check()
    assert scene.data["redis"]


async def test_standby_writes_nothing() -> None:
    scene = Scene()
    scene.leads = False
    assert not await scene.secrets.check()
    assert scene.written() == []


async def test_invalid_base64_is_replaced() -> None:
    scene = Scene()
    scene.data["redis"] = {"password": "%"}
    assert await scene.secrets.check()
    assert len(base64.b64decode(scene.data["redis"]["password"])) >= 40
