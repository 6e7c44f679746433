"""What kopf does for the operator: it notices pools, keeps one daemon for each, and holds a deleted one until drained.

kopf watches InferencePools alone, for its finalizer's sake. Pods and children are in ``watches``, whose mirrors, unlike
kopf's indexes, also lose what was deleted while nobody was watching. ``wiring`` runs what is made here.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import kopf

from dualmap.errors import PoolError
from dualmap.objects.pool_reader import GROUP
from dualmap_edge.kube.client import Connection
from dualmap_edge.logs import get_logger
from dualmap_operator.decide.spec import DRAIN_TIMEOUT_S, read_spec
from dualmap_operator.names import FINALIZER, PLURAL, VERSION
from dualmap_operator.run.reconciler import Keeper, Keepers

# As edge.kube's: the server ends each watch in time, and silence beyond that is a connection cut without a word.
_WATCH_TIMEOUT_S: Final = 45
_WATCH_INACTIVITY_S: Final = 55
_DAEMON_EXIT_S: Final = 1.0
_POLL_S: Final = 1.0
# How long after drain.timeout an operator lets a deleted pool go that it found, whatever keeps its drain from ending: a
# finalizer never sticks.
_LENIENCE_S: Final = 30.0


class _Backoffs:
    """Pauses after failed requests, without an end: kopf would end the operator when they run out."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1.0), itertools.repeat(2.0))


def make_registry(
    keepers: Keepers, clock: Callable[[], float], *, connection: Callable[[], Awaitable[Connection]]
) -> kopf.OperatorRegistry:
    """Return the handlers, by which ``keepers`` keep a pool from its first appearance until it has drained.

    ``clock`` is monotonic, in seconds. ``connection`` returns the connection that the operator's own client uses.
    """
    registry, log = kopf.OperatorRegistry(), get_logger(__name__)

    @kopf.on.login(registry=registry, backoff=_POLL_S)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        # kopf's own login in a pod uses https://kubernetes.default.svc, which needs the cluster's DNS.
        return kopf_connection(await connection())

    @kopf.daemon(GROUP, VERSION, PLURAL, registry=registry, id="keep", cancellation_polling=_POLL_S)
    async def keep(namespace: str | None, name: str, uid: str, stopped: kopf.DaemonStopped, **_: Any) -> None:
        async def until(_keeper: Keeper) -> None:
            await stopped.wait()

        await keepers.keep((namespace or "", name), uid, until)
        if not stopped and not keepers.closing.is_set():
            raise kopf.TemporaryError("the pool's loop ended by itself, it is begun anew", delay=_POLL_S)

    @kopf.on.delete(GROUP, VERSION, PLURAL, registry=registry, id="drain", backoff=_POLL_S)
    async def drain(namespace: str | None, name: str, uid: str, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        async def until(keeper: Keeper) -> None:
            await keeper.finished.wait()

        # Not from the deletion itself: the pool may have been deleted long before anybody was there to drain it. What
        # kopf remembers of an object lasts as long as this operator and the object do.
        began_s = memo.setdefault("drain_began_s", clock())
        left_s = began_s + longest_drain_s(body) - clock()
        if not await keepers.keep((namespace or "", name), uid, until, timeout_s=max(0.0, left_s)):
            if clock() < began_s + longest_drain_s(body):
                raise kopf.TemporaryError("the pool has not drained yet, its drain is gone on with", delay=_POLL_S)
            log.warning("a deleted pool is let go, though its drain has not ended", pool=f"{namespace}/{name}")

    return registry


def kopf_connection(connection: Connection) -> kopf.ConnectionInfo:
    """Return a connection in kopf's terms."""
    scheme, _, token = connection.authorization.partition(" ")
    return kopf.ConnectionInfo(
        server=connection.server,
        ca_path=connection.ca_file or None,
        insecure=not connection.verify_tls,
        scheme=scheme or None,
        token=token or None,
        certificate_path=connection.certificate_file or None,
        private_key_path=connection.key_file or None,
        proxy_url=connection.proxy or None,
    )


def longest_drain_s(body: Mapping[str, Any]) -> float:
    """Return how long an operator holds a deleted pool at the longest, in seconds."""
    try:
        timeout_s = read_spec(body).drain_timeout_s
    except PoolError:
        timeout_s = DRAIN_TIMEOUT_S
    return timeout_s + _LENIENCE_S


def make_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our finalizer and annotations, no Events, no watching of namespaces and CRDs."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # Which kinds and namespaces there are is looked up once: watching that would need rights over the whole cluster.
    settings.scanning.disabled = True
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.watching.server_timeout = _WATCH_TIMEOUT_S
    settings.watching.inactivity_timeout = _WATCH_INACTIVITY_S
    settings.networking.request_timeout = 10.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = _Backoffs()
    settings.background.instant_exit_timeout = _DAEMON_EXIT_S
    settings.queueing.exit_timeout = _DAEMON_EXIT_S
    settings.process.ultimate_exiting_timeout = None
    return settings
