"""The engines that the end-to-end tests share, and one deployment per message mode over all of them.

Started once per session and used by every test that leaves it as it found it: processes take seconds to start, so
several pools in one router stand for the several situations that tests need.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import document, member_of, queue
from harness.stack import Engine, PoolMember
from harness.upstream import Upstream, plain

FAST = "50"
SLOW = "0.05"
# No prompt of a test is too long for such a pool, so that a new one may go to either of its pair.
# An engine so slow, as its router is told, that one long prompt keeps whatever comes after it waiting.
BUSY: Mapping[str, Any] = {"engine": {"prefillTokensPerSecond": 100}}
PATIENT: Mapping[str, Any] = {"engine": {"prefillTokensPerSecond": 1_000_000}, "slo": {"ttft": "10m"}}


class SharedEngines:
    """Engines and deployments.

    Pools, by name: ``scripted`` has two upstreams whose answers the test decides, and takes what no router picked;
    ``fast`` and ``slow`` have simulated engines, two quick ones and one that needs minutes for a long prompt;
    ``halved`` has a member where nothing listens; ``empty`` has none; ``changing`` is for tests that change members.
    ``queued`` and ``hasty`` have one upstream that is handed one prompt at a time: in ``queued`` three more may wait,
    in order, in ``hasty`` none for long. ``awaited`` has no member, and requests wait for the first.
    The model of pool X is ``X-model``, its alias ``X``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.left = Upstream(name="left")
        self.right = Upstream(name="right")
        # In no pool: whoever reaches it followed a header that a client made up.
        self.outsider = Upstream(name="outsider")
        self.fast = [self._engine(f"fast-{number}", "fast-model", FAST) for number in range(2)]
        self.slow = self._engine("slow", "slow-model", SLOW)
        self._deployments: dict[Mode, Deployment] = {}
        self._stack = AsyncExitStack()

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Every upstream, the outsider too."""
        return self.left, self.right, self.outsider

    async def deployment(self, mode: Mode) -> Deployment:
        """Return the mode's deployment, started when it is first asked for; its router is running."""
        deployment = self._deployments.get(mode)
        if deployment is None:
            directory = self._directory / mode.value
            directory.mkdir()
            deployment = Deployment(self.documents(), mode=mode, directory=directory)
            await self._stack.enter_async_context(deployment)
            self._deployments[mode] = deployment
        if deployment.router.returncode is not None:
            await deployment.restart_router()
        return deployment

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return every pool's document; the first takes what no router picked."""
        scripted = [member_of(self.left), member_of(self.right)]
        # TCP port 9 (discard) is in nobody's use here.
        dead = PoolMember(id="dead", address="127.0.0.1", port=9)
        return {
            "scripted": document("scripted", scripted),
            "fast": document("fast", [engine.member for engine in self.fast]),
            "slow": document("slow", [self.slow.member]),
            "halved": document("halved", [member_of(self.left), dead], **PATIENT),
            "empty": document("empty", []),
            "changing": document("changing", scripted),
            "queued": document("queued", [member_of(self.left)], **BUSY, **queue(maxHeld=3, maxOvertaken=0)),
            "hasty": document("hasty", [member_of(self.left)], **BUSY, **queue(maxWait="200ms")),
            "awaited": document("awaited", [], **queue(holdWhenEmpty=True)),
        }

    def reset(self) -> None:
        """Let every upstream answer plainly and forget what it received."""
        for upstream in self.upstreams:
            upstream.answer = plain
            upstream.received.clear()
            upstream.aborted = 0

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        for upstream in self.upstreams:
            await self._stack.enter_async_context(upstream)
        await asyncio.gather(*(self._stack.enter_async_context(engine) for engine in (self.slow, *self.fast)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _engine(self, name: str, model: str, speed: str) -> Engine:
        return Engine(directory=self._directory, name=name, arguments=("--model", model, "--speed", speed))
