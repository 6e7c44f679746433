"""Records Kubernetes Events on pools: a repeated Event increments its count, and each pool has a rate limit.

``apply`` passes each plan's Events to this recorder. If an Event cannot be recorded, the recorder logs the error and
drops the Event: no other function depends on Events.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from dualmap.objects.pool_reader import API_VERSION, GROUP
from dualmap_edge.logs import get_logger
from dualmap_operator.api import Api
from dualmap_operator.decide.plan_values import Event
from dualmap_operator.errors import ApiError, ConflictError, GoneError
from dualmap_operator.names import KIND
from dualmap_operator.observe.watches import PoolObject

_API_VERSION: Final = "events.k8s.io/v1"
_NOTE_CHARACTERS: Final = 1024
_REMEMBERED: Final = 1024
_BURST: Final = 30.0
_PER_SECOND: Final = 0.1


class EventRecorder:
    """Records Events as ``identity``. ``now`` returns the wall-clock time; ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        api: Api,
        *,
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._identity = identity
        self._clock = clock
        self._now = now
        self._log = get_logger(__name__)
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def post(self, pool: PoolObject, event: Event) -> None:
        """Record one Event on ``pool``, or increment the count of an equal Event."""
        metadata = pool.document["metadata"]
        name = _name(metadata["name"], pool.uid, event)
        self._log.info(
            "Recording event",
            pool=f"{metadata['namespace']}/{metadata['name']}",
            reason=event.reason.value,
            note=event.message,
        )
        if not self._within_budget(pool.uid):
            return
        try:
            if name in self._counts:
                await self._count_up(metadata["namespace"], name)
            else:
                await self._create(metadata, name, pool.uid, event)
        except ApiError as error:
            self._log.warning("Recording event failed", reason=event.reason.value, error=str(error))

    async def _create(self, metadata: dict[str, Any], name: str, uid: str, event: Event) -> None:
        self._remember(name, 1)
        try:
            await self._api.create(
                {
                    "apiVersion": _API_VERSION,
                    "kind": "Event",
                    "metadata": {"namespace": metadata["namespace"], "name": name},
                    "eventTime": _micro_time(self._now()),
                    "reportingController": f"{GROUP}/operator",
                    "reportingInstance": self._identity,
                    "action": "Reconcile",
                    "type": "Warning" if event.warning else "Normal",
                    "reason": event.reason.value,
                    "note": event.message[:_NOTE_CHARACTERS],
                    "regarding": {
                        "apiVersion": API_VERSION,
                        "kind": KIND,
                        "namespace": metadata["namespace"],
                        "name": metadata["name"],
                        "uid": uid,
                    },
                }
            )
        except ConflictError:
            # An earlier operator process recorded this Event.
            await self._count_up(metadata["namespace"], name)

    async def _count_up(self, namespace: str, name: str) -> None:
        count = self._counts[name] + 1
        series = {"count": count, "lastObservedTime": _micro_time(self._now())}
        try:
            await self._api.merge(
                {
                    "apiVersion": _API_VERSION,
                    "kind": "Event",
                    "metadata": {"namespace": namespace, "name": name},
                    "series": series,
                }
            )
        except GoneError:
            # The API server deletes Events after an hour; the next equal Event creates the object again.
            del self._counts[name]
        else:
            self._remember(name, count)

    def _remember(self, name: str, count: int) -> None:
        self._counts[name] = count
        self._counts.move_to_end(name)
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    def _within_budget(self, uid: str) -> bool:
        now_s = self._clock()
        left, at_s = self._budgets.get(uid, (_BURST, now_s))
        left = min(_BURST, left + _PER_SECOND * (now_s - at_s))
        self._budgets[uid] = (left - 1.0 if left >= 1.0 else left, now_s)
        self._budgets.move_to_end(uid)
        if len(self._budgets) > _REMEMBERED:
            self._budgets.popitem(last=False)
        return left >= 1.0


def _name(pool: str, uid: str, event: Event) -> str:
    said = "\n".join((uid, event.reason.value, event.message))
    return f"{pool}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _micro_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
