"""Leader election: acquires, renews and releases a Lease (coordination.k8s.io).

``process`` runs the control loops while this operator leads. This module does not use the leader election of the
Kubernetes library (``kubernetes.aio.leaderelection``). The library's election writes local time marked as UTC, ends on
an error without an HTTP answer, and never releases a lease. One of its requests may also exceed the election's
deadline.

An operator computes the lease's expiry with its own monotonic clock, from its first read of the lease's present
version. The times in the lease are never compared with the operator's clock, because the clocks of two machines differ.
"""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from dualmap_edge.logs import get_logger
from dualmap_operator.api import Api, collection_path
from dualmap_operator.errors import ApiError, ConflictError, GoneError, OperatorError
from dualmap_operator.settings import LeaseSettings

_API_VERSION: Final = "coordination.k8s.io/v1"
_RELEASED_DURATION_S: Final = 1
_RELEASE_S: Final = 2.0


class LeadershipLostError(OperatorError):
    """The lease was not renewed in time, or another operator holds it: this operator must stop all writes."""


class Leadership:
    """One candidate for the Lease ``settings.name`` in ``namespace``, with the unique name ``identity``.

    ``clock`` is monotonic, in seconds. ``now`` returns the wall-clock time for the fields of the Lease.
    """

    def __init__(
        self,
        api: Api,
        settings: LeaseSettings,
        *,
        namespace: str,
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._settings = settings
        self._identity = identity
        self._clock = clock
        self._now = now
        self._log = get_logger(__name__)
        self._collection = collection_path(_API_VERSION, "Lease", namespace)
        self._metadata = {"name": settings.name, "namespace": namespace}
        self._seen: dict[str, Any] | None = None
        self._seen_at_s = 0.0
        self._renewed_at_s: float | None = None
        self._may_hold = False

    @property
    def leading(self) -> bool:
        """True if this candidate may write now."""
        return self._left_s() > 0

    def _left_s(self) -> float:
        """Return the remaining seconds in which this candidate may write without a renewal."""
        if self._renewed_at_s is None:
            return 0.0
        return self._renewed_at_s + self._settings.renew_within_s - self._clock()

    async def acquire(self) -> None:
        """Acquire the lease: log errors and retry without limit."""
        while True:
            if await self._try_to_take():
                break
            await asyncio.sleep(self._settings.retry_s)
        self._log.info("Leading", lease=self._settings.name, identity=self._identity)

    async def renew(self) -> None:
        """Renew the lease periodically.

        Raises LeadershipLostError if another candidate holds the lease, or at the deadline for the renewal.
        """
        try:
            while (left_s := self._left_s()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await asyncio.sleep(self._settings.retry_s)
                        await self._renew_once()
            raise LeadershipLostError(
                f"the lease {self._settings.name} was not renewed within {self._settings.renew_within_s:g} s"
            )
        except LeadershipLostError:
            self._renewed_at_s, self._may_hold = None, False
            raise

    async def _renew_once(self) -> None:
        """Try to renew the lease once; log errors."""
        began_s = self._clock()
        timeout_s = self._settings.retry_s
        try:
            try:
                await self._replace(self._spec(self._identity, taking=False), timeout_s=timeout_s)
            except ConflictError as error:
                # The lease has changed since the last read. After a lost response, the change may be this operator's
                # own write.
                if not await self._look(timeout_s) or self._holder() != self._identity:
                    raise LeadershipLostError(f"another operator holds the lease {self._settings.name}") from error
                await self._replace(self._spec(self._identity, taking=False), timeout_s=timeout_s)
        except ApiError as error:
            self._log.warning("Renewing lease failed, retrying", error=str(error))
        else:
            self._renewed_at_s = began_s

    async def release(self) -> None:
        """Release the lease, so that the next candidate acquires it at once; log errors (the lease then expires).

        This method also releases a lease if ``acquire`` was cancelled during its request.
        """
        if not self._may_hold:
            return
        self._renewed_at_s, self._may_hold = None, False
        try:
            if await self._look(_RELEASE_S) and self._holder() == self._identity:
                await self._replace(self._spec("", taking=False), timeout_s=_RELEASE_S)
        except ApiError as error:
            self._log.warning("Releasing lease failed, waiting for its expiry", error=str(error))

    async def _try_to_take(self) -> bool:
        began_s = self._clock()
        try:
            there = await self._look(self._settings.retry_s)
            if there and not self._free():
                return False
            # From here on, the server may have granted the lease even if its answer is lost.
            self._may_hold = True
            if there:
                await self._replace(self._spec(self._identity, taking=True), timeout_s=self._settings.retry_s)
            else:
                await self._create()
        except ConflictError:
            return False  # Another candidate has written the lease first.
        except ApiError as error:
            self._log.warning("Acquiring lease failed, retrying", error=str(error))
            return False
        self._renewed_at_s = began_s
        return True

    async def _look(self, timeout_s: float) -> bool:
        """Read the lease and record the time of a new version; return False if there is no lease. Raises ApiError."""
        try:
            lease = await self._api.request("GET", self._path, timeout_s=timeout_s)
        except GoneError:
            return False
        self._note(lease)
        return True

    def _free(self) -> bool:
        spec = (self._seen or {}).get("spec") or {}
        duration_s = spec.get("leaseDurationSeconds") or self._settings.duration_s
        return self._holder() in ("", self._identity) or self._clock() - self._seen_at_s >= duration_s

    def _holder(self) -> str:
        return str(((self._seen or {}).get("spec") or {}).get("holderIdentity") or "")

    def _spec(self, holder: str, *, taking: bool) -> dict[str, Any]:
        """Return the spec to write: the last spec read, with changes. Times are in UTC with microseconds."""
        now = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (self._seen or {}).get("spec") or {}
        spec = {
            **before,
            "holderIdentity": holder,
            "leaseDurationSeconds": round(self._settings.duration_s) if holder else _RELEASED_DURATION_S,
            "renewTime": now,
        }
        if taking:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (before.get("leaseTransitions") or 0) + 1
        return spec

    async def _create(self) -> None:
        spec = {**self._spec(self._identity, taking=True), "leaseTransitions": 0}
        body = {"apiVersion": _API_VERSION, "kind": "Lease", "metadata": self._metadata, "spec": spec}
        self._note(await self._api.request("POST", self._collection, body=body, timeout_s=self._settings.retry_s))

    async def _replace(self, spec: dict[str, Any], *, timeout_s: float) -> None:
        """Write the lease; raise ConflictError if the lease has changed since the last read."""
        version = ((self._seen or {}).get("metadata") or {}).get("resourceVersion", "")
        metadata = {**self._metadata, "resourceVersion": version}
        body = {"apiVersion": _API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}
        self._note(await self._api.request("PUT", self._path, body=body, timeout_s=timeout_s))

    def _note(self, lease: dict[str, Any]) -> None:
        if self._seen is None or lease.get("metadata") != self._seen.get("metadata"):
            self._seen_at_s = self._clock()
        self._seen = lease

    @property
    def _path(self) -> str:
        return f"{self._collection}/{quote(self._settings.name)}"
