"""The operator's two HTTP ports: ``/healthz`` for who restarts it when it is ill, ``/metrics`` for Prometheus.

``wiring`` gives it what to say. A standby is healthy as long as it answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from dualmap_edge.ports import IDLE_TIMEOUT_S, AddressError, check_free
from dualmap_operator.run.metrics import CONTENT_TYPE, Metrics

# A watch says something at least every 45 s, since the server ends it then, with a bookmark.
SILENT_S: Final = 120.0
# kopf begins to keep a pool within a second of the mirror's showing it; longer than this, its own watch is ill.
UNKEPT_S: Final = 30.0


def problems(*, ages_s: Mapping[str, float], stuck: Sequence[str], unkept_s: Mapping[str, float]) -> tuple[str, ...]:
    """Return what is wrong with an operator that acts, in words.

    ``ages_s`` is how long ago each kind's watch gave word, ``stuck`` the pools whose pass hangs, and ``unkept_s`` for
    how long nobody has kept a pool.
    """
    return (
        *(f"nothing was heard of {kind} for {age_s:.0f} s" for kind, age_s in ages_s.items() if age_s > SILENT_S),
        *(f"the pass over {pool} hangs" for pool in stuck),
        *(f"nobody keeps {pool}, for {for_s:.0f} s" for pool, for_s in unkept_s.items() if for_s > UNKEPT_S),
    )


class HttpServer:
    """Serves what ``problems`` and ``metrics`` say at the time of each request, on a port each.

    Who has asked nothing whole for ``idle_timeout_s`` is cut off.
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
        """Listen on both ports (0: any free one) and return them. Raises AddressError."""
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
        """Stop listening and end what is open."""
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
    """Listen on a port, 0 for any free one, and return it. Raises AddressError."""
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
