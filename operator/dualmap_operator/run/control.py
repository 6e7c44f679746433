"""The control loops of the leading operator: the mirrors and kopf, which runs one reconciler for each pool.

``process`` starts the loops when this operator leads. ``health`` serves the result of ``problems``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import kopf

from dualmap_edge.kube.client import Connection
from dualmap_operator.errors import OperatorError
from dualmap_operator.observe.mirror import Key, Mirror
from dualmap_operator.observe.watches import Watches
from dualmap_operator.run.handlers import make_registry, make_settings
from dualmap_operator.run.health import problems
from dualmap_operator.run.metrics import Metrics
from dualmap_operator.run.reconciler import Reconcilers
from dualmap_operator.run.tasks import finished_before

_NOT_FOUND: Final = 404


class ControlError(OperatorError):
    """A mirror or kopf ended unexpectedly; the message contains the cause. The kubelet restarts the operator."""


class ControlLoops:
    """Runs ``mirrors`` and kopf for the pools in ``namespace`` (None: all). ``process`` calls ``run`` once.

    ``connection`` returns the connection of the operator's own client. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        watches: Watches,
        mirrors: Sequence[Mirror[Any]],
        reconcilers: Reconcilers,
        connection: Callable[[], Awaitable[Connection]],
        namespace: str | None,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._watches = watches
        self._mirrors = mirrors
        self._reconcilers = reconcilers
        self._connection = connection
        self._namespace = namespace
        self._metrics = metrics
        self._clock = clock
        self._stopping = asyncio.Event()
        self._unreconciled_since_s: dict[Key, float] = {}
        self._running = False

    async def run(self, started: Callable[[], None]) -> None:
        """Run until ``stop``; call ``started`` when kopf has installed its signal handlers.

        Raises ControlError if a mirror or kopf ends before ``stop``.
        """
        self._running = True
        self._metrics.watch(self._ages_s)
        # The mirrors start before kopf: at its end, kopf cancels every task that was started after kopf.
        tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors]
        tasks.append(asyncio.create_task(self._run_kopf(started)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Exception as error:
            raise ended(error) from error
        finally:
            self._running = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Let each reconciler finish its current reconcile, and make ``run`` return."""
        self._reconcilers.closing.set()
        self._stopping.set()

    def problems(self) -> tuple[str, ...]:
        """Return descriptions of this operator's problems; none while the operator is on standby."""
        if not self._running:
            return ()
        now_s = self._clock()
        unreconciled = {key for key, _ in self._watches.pools.items() if not self._reconcilers.is_running(key)}
        self._unreconciled_since_s = {key: self._unreconciled_since_s.get(key, now_s) for key in unreconciled}
        return problems(
            ages_s=self._ages_s(),
            stuck=self._reconcilers.stuck(),
            unreconciled_s={"/".join(key): now_s - since_s for key, since_s in self._unreconciled_since_s.items()},
        )

    def _ages_s(self) -> dict[str, float]:
        return {mirror.kind: mirror.age_s for mirror in self._mirrors}

    async def _run_kopf(self, started: Callable[[], None]) -> None:
        """Run kopf and the reconcilers after every list is complete: with incomplete lists, pods would look deleted."""
        if not await finished_before(self._stopping, self._listed()):
            return
        ready = asyncio.Event()
        calling = asyncio.create_task(_call_after(ready, started))
        try:
            await kopf.operator(
                registry=make_registry(self._reconcilers, self._clock, connection=self._connection),
                settings=make_settings(),
                standalone=True,
                clusterwide=self._namespace is None,
                namespaces=[] if self._namespace is None else [self._namespace],
                stop_flag=self._stopping,
                ready_flag=ready,
            )
        finally:
            calling.cancel()

    async def _listed(self) -> None:
        for mirror in self._mirrors:
            await mirror.listed.wait()


def ended(error: Exception) -> ControlError:
    """Return a ControlError for the ``error`` of a mirror or kopf."""
    # Of the mirrors and kopf, only kopf ends on an error response of the API server. kopf lists and watches pools only.
    # The error classes of kopf are private, but their HTTP status is public.
    if getattr(error, "status", None) == _NOT_FOUND:
        return ControlError(
            "the API server no longer serves InferencePools; is the CRD deleted? After a restart, the operator waits "
            "for the CRD"
        )
    return ControlError(f"a task of the operator ended unexpectedly: {error!r}")


async def _call_after(event: asyncio.Event, function: Callable[[], None]) -> None:
    await event.wait()
    function()
