"""The operator's two HTTP ports: ``/healthz`` for the kubelet's liveness probe and ``/metrics`` for Prometheus.

A standby operator reports no problems.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from dualmap_edge.ports import IDLE_TIMEOUT_S, AddressError, check_free
from dualmap_operator.run.metrics import CONTENT_TYPE, Metrics

# A working watch is never silent for this time: the server ends every watch after 45 s, usually after a bookmark.
SILENT_S: Final = 120.0
# kopf normally starts a pool's reconciler within a second after the mirror contains the pool. Without a reconciler
# after this time, kopf's watch is broken.
UNRECONCILED_S: Final = 30.0


def problems(
    *, ages_s: Mapping[str, float], stuck: Sequence[str], unreconciled_s: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the descriptions of a leading operator's problems.

    ``ages_s`` is the age of each kind's mirror. ``stuck`` contains the pools with a stuck reconcile. ``unreconciled_s``
    is the time for which each pool has had no reconciler.
    """
    return (
        *(f"no data from the watch of {kind} for {age_s:.0f} s" for kind, age_s in ages_s.items() if age_s > SILENT_S),
        *(f"reconcile of {pool} is stuck" for pool in stuck),
        *(
            f"{pool} has had no reconciler for {for_s:.0f} s"
            for pool, for_s in unreconciled_s.items()
            if for_s > UNRECONCILED_S
        ),
    )


class HttpServer:
    """Serves ``problems`` and ``metrics``, each on its own port.

    The server closes a connection without a complete request for ``idle_timeout_s``.
    """

    def __init__(
        self, *, problems: Callable[[], Sequence[str]], metrics: Metrics, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self._problems = problems
        self._metrics = metrics
        self._runners = (
            _runner(web.get("/healthz", self._get_health), idle_timeout_s),
            _runner(web.get("/metrics", self._get_metrics), idle_timeout_s),
        )

    async def start(self, host: str, *, health_port: int, metrics_port: int) -> tuple[int, int]:
        """Listen on both ports (0: any free port) and return them. Raises AddressError."""
        health, metrics = self._runners
        try:
            return (
                await _listen(health, host, health_port, "--health-port"),
                await _listen(metrics, host, metrics_port, "--metrics-port"),
            )
        except AddressError:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop listening and close open connections."""
        for runner in self._runners:
            await runner.cleanup()

    async def _get_health(self, _request: web.Request) -> web.Response:
        problems = self._problems()
        if problems:
            return web.Response(status=500, text="".join(f"{each}\n" for each in problems))
        return web.Response(text="ok\n")

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _listen(runner: web.AppRunner, host: str, port: int, option: str) -> int:
    """Listen on ``port`` (0: any free port) and return the port. Raises AddressError."""
    check_free(host, port, option)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise AddressError(host, port, option, error.strerror) from error
    return int(runner.addresses[0][1])


def _runner(route: web.RouteDef, idle_timeout_s: float) -> web.AppRunner:
    application = web.Application()
    application.add_routes([route])
    return web.AppRunner(application, access_log=None, shutdown_timeout=1.0, keepalive_timeout=idle_timeout_s)
