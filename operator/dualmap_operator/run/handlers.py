"""kopf handlers: a daemon runs each pool's reconciler; a finalizer keeps a deleted pool until it has drained.

kopf watches InferencePools only, because kopf maintains the finalizer. The mirrors in ``watches`` contain pods and
children. Unlike kopf's indexes, these mirrors also detect objects that were deleted while no watch was open.
``control`` runs these handlers.
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
from dualmap_operator.run.reconciler import Reconciler, Reconcilers

# The server ends every watch after _WATCH_TIMEOUT_S. A watch without data for _WATCH_INACTIVITY_S has a broken
# connection (as in dualmap_edge.kube.client).
_WATCH_TIMEOUT_S: Final = 45
_WATCH_INACTIVITY_S: Final = 55
_DAEMON_EXIT_S: Final = 1.0
_POLL_S: Final = 1.0
# The time after drain.timeout at which the finalizer is removed even if the drain has not ended.
_GRACE_S: Final = 30.0


class _Backoffs:
    """An endless sequence of pauses after failed requests: with a finite sequence, kopf would end the operator."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1.0), itertools.repeat(2.0))


def make_registry(
    reconcilers: Reconcilers, clock: Callable[[], float], *, connection: Callable[[], Awaitable[Connection]]
) -> kopf.OperatorRegistry:
    """Return kopf handlers that run one reconciler for each pool until the pool has drained.

    ``clock`` is monotonic, in seconds. ``connection`` returns the connection that the operator's own client uses.
    """
    registry, log = kopf.OperatorRegistry(), get_logger(__name__)

    @kopf.on.login(registry=registry, backoff=_POLL_S)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        # kopf's own login in a pod uses https://kubernetes.default.svc, which needs the cluster's DNS.
        return kopf_connection(await connection())

    @kopf.daemon(GROUP, VERSION, PLURAL, registry=registry, id="keep", cancellation_polling=_POLL_S)
    async def keep(namespace: str | None, name: str, uid: str, stopped: kopf.DaemonStopped, **_: Any) -> None:
        async def until(_reconciler: Reconciler) -> None:
            await stopped.wait()

        await reconcilers.run((namespace or "", name), uid, until)
        if not stopped and not reconcilers.closing.is_set():
            raise kopf.TemporaryError("the reconciler ended unexpectedly and is restarted", delay=_POLL_S)

    @kopf.on.delete(GROUP, VERSION, PLURAL, registry=registry, id="drain", backoff=_POLL_S)
    async def drain(namespace: str | None, name: str, uid: str, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
        async def until(reconciler: Reconciler) -> None:
            await reconciler.finished.wait()

        # The drain time starts here and not at the deletion: the pool may have been deleted long before an operator
        # ran. The memo exists until this operator ends or the object is removed.
        began_s = memo.setdefault("drain_began_s", clock())
        left_s = began_s + longest_drain_s(body) - clock()
        if not await reconcilers.run((namespace or "", name), uid, until, timeout_s=max(0.0, left_s)):
            if clock() < began_s + longest_drain_s(body):
                raise kopf.TemporaryError("the pool has not drained yet", delay=_POLL_S)
            log.warning("Removing finalizer before the drain has ended", pool=f"{namespace}/{name}")

    return registry


def kopf_connection(connection: Connection) -> kopf.ConnectionInfo:
    """Return a connection as a kopf ConnectionInfo."""
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
    """Return the longest time for which an operator keeps a deleted pool's finalizer, in seconds."""
    try:
        timeout_s = read_spec(body).drain_timeout_s
    except PoolError:
        timeout_s = DRAIN_TIMEOUT_S
    return timeout_s + _GRACE_S


def make_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our finalizer and annotations, no Events, and no watches of namespaces or CRDs."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # kopf reads kinds and namespaces once: a watch of them would need cluster-wide permissions.
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
