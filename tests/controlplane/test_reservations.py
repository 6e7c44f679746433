"""The operator's writes to the ConfigMap of reserved model names."""

import asyncio
from typing import Any

import pytest

from controlplane.fake_kube import Counts, FakeKube, Request
from dualmap_edge.kube.client import KubeError
from dualmap_operator.act.reservations import NAMESPACE_BYTES, ReservationWriter
from dualmap_operator.api import Api
from dualmap_operator.errors import ApiError, ConflictError

LIST = "/api/v1/namespaces/dualmap-system/configmaps"
PATH = f"{LIST}/dualmap-models"


class Scene:
    """A ConfigMap with ``data`` on a server that checks the version of a write."""

    def __init__(self, data: dict[str, str] | None) -> None:
        self.data = data
        self.version = 7
        self.kube = FakeKube()
        self.kube.answer("GET", LIST, self._list)
        self.kube.answer("PATCH", PATH, self._patch)
        api = Api(self.kube, Counts(), lambda: True)  # type: ignore[arg-type]  # stands for it
        self.writer = ReservationWriter(api, namespace="dualmap-system")

    def _list(self, request: Request) -> dict[str, Any]:
        assert request.query == {"fieldSelector": "metadata.name=dualmap-models"}
        item = {"metadata": {"resourceVersion": str(self.version)}, "data": self.data}
        return {"items": [] if self.data is None else [item]}

    def _patch(self, request: Request) -> dict[str, Any]:
        if request.body["metadata"]["resourceVersion"] != str(self.version):
            raise KubeError(409, "changed")
        self.version += 1
        assert self.data is not None
        self.data |= request.body["data"]
        return {}

    @property
    def writes(self) -> int:
        return sum(each.method == "PATCH" for each in self.kube.requests)


async def test_reserve_adds_only_names_that_are_not_reserved() -> None:
    scene = Scene({"llm": "mine\n", "prod": "theirs\n", "fixed.prod": "fixed"})
    await scene.writer.reserve("llm", ["mine", "theirs", "fixed", "new", "Qwen/Qwen2.5-7B"])
    assert scene.data == {"llm": "mine\nnew\nQwen/Qwen2.5-7B\n", "prod": "theirs\n", "fixed.prod": "fixed"}
    await scene.writer.reserve("llm", ["new"])
    assert scene.writes == 1


async def test_concurrent_reservations_keep_all_names() -> None:
    scene = Scene({})
    await asyncio.gather(*(scene.writer.reserve("llm" if n % 2 else "prod", [f"m{n}"]) for n in range(8)))
    assert scene.data == {"llm": "m1\nm3\nm5\nm7\n", "prod": "m0\nm2\nm4\nm6\n"}


async def test_reserve_during_an_administrators_edit_is_a_conflict() -> None:
    scene = Scene({})
    scene.kube.answer_instead("PATCH", PATH, KubeError(409, "changed"))
    with pytest.raises(ConflictError):
        await scene.writer.reserve("llm", ["new"])


async def test_reserve_without_config_map_fails() -> None:
    with pytest.raises(ApiError, match="dualmap-system/dualmap-models does not exist"):
        await Scene(None).writer.reserve("llm", ["new"])


async def test_names_of_one_namespace_are_limited() -> None:
    scene = Scene({"llm": "x" * (NAMESPACE_BYTES - 3)})
    await scene.writer.reserve("llm", ["y"])
    with pytest.raises(ApiError, match="exceed 65536 bytes"):
        await scene.writer.reserve("llm", ["z"])
    await scene.writer.reserve("prod", ["z"])
