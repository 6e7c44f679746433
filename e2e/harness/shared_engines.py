"""The engines that the end-to-end tests share, and one deployment per message mode over all of them.

Tests share the engines for a session and restore all changes, because processes take seconds to start. One router has a
separate pool for each situation that a test needs.
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
# PATIENT has so long an SLO that a new prompt may go to either member of its pair. BUSY sets so low an engine speed
# that later requests queue behind one long prompt.
BUSY: Mapping[str, Any] = {"engine": {"prefillTokensPerSecond": 100}}
PATIENT: Mapping[str, Any] = {"engine": {"prefillTokensPerSecond": 1_000_000}, "slo": {"ttft": "10m"}}


class SharedEngines:
    """Engines, and deployments in front of them.

    Pools, by name: ``scripted`` has two upstreams whose answers the test sets;
    ``fast`` has two fast simulated engines, ``slow`` has one that needs minutes for a long prompt;
    ``halved`` has one member where nothing listens; ``empty`` has no member; tests change the members of ``changing``.
    ``queued`` and ``hasty`` have one upstream that gets one prompt at a time: ``queued`` queues three more in order,
    ``hasty`` has a short maximum wait. ``awaited`` has no member, and requests queue for the first.
    The model of pool X is ``X-model``, its alias ``X``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.left = Upstream(name="left")
        self.right = Upstream(name="right")
        # This engine is in no pool. A request reaches it only if Envoy uses a destination header from the client.
        self.outsider = Upstream(name="outsider")
        self.fast = [self._engine(f"fast-{number}", "fast-model", FAST) for number in range(2)]
        self.slow = self._engine("slow", "slow-model", SLOW)
        self._deployments: dict[tuple[Mode, str], Deployment] = {}
        self._stack = AsyncExitStack()

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Every upstream, including the outsider."""
        return self.left, self.right, self.outsider

    async def deployment(self, mode: Mode, only: str = "") -> Deployment:
        """Return the mode's deployment with a running router; the first call starts the deployment.

        The deployment has all pools, or the pool ``only``, whose engines get requests without a pick.
        """
        deployment = self._deployments.get((mode, only))
        if deployment is None:
            directory = self._directory / f"{mode.value}-{only or 'all'}"
            directory.mkdir()
            documents = self.documents()
            deployment = Deployment({only: documents[only]} if only else documents, mode=mode, directory=directory)
            await self._stack.enter_async_context(deployment)
            self._deployments[mode, only] = deployment
        if deployment.router.returncode is not None:
            await deployment.restart_router()
        return deployment

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return every pool's document."""
        scripted = [member_of(self.left), member_of(self.right)]
        # Nothing listens on TCP port 9 (discard).
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
        """Reset every upstream's answer and clear its recorded requests."""
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
