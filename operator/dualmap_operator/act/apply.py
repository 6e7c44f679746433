"""Carries out a plan in this order: children, reservations, status, gates, restarts, Events.

Only changed objects are written.

Each pool's reconciler owns one ``Applier``. The status write contains the pool's resource version at the time of the
plan, so an outdated plan fails with a conflict. The operator may restart between any two writes; the next plan then
completes the rest.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dualmap_edge.logs import get_logger
from dualmap_operator.act.events import EventRecorder
from dualmap_operator.act.reservations import ReservationWriter
from dualmap_operator.api import Api
from dualmap_operator.decide.plan_values import Gate, Plan, Restart
from dualmap_operator.decide.status import status_document
from dualmap_operator.errors import ApiError, ConflictError, GoneError, NotLeadingError
from dualmap_operator.names import EventReason
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.watches import ChildObject, PoolObject, fingerprint, read_child

_AT_A_TIME: Final = 16
# The status lists at most this many of the gates that could not be set.
_NAMED: Final = 3
# These Events report a change of the StatefulSet's size.
_SCALING: Final = (EventReason.SCALED_UP, EventReason.SCALED_DOWN, EventReason.DRAIN_TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of a plan: the errors of failed writes, and whether the pool's status was written."""

    refused: tuple[str, ...] = ()
    wrote_status: bool = False


class PlanApplier(Protocol):
    """An object that carries out the plans of one reconciler."""

    async def apply(self, pool: PoolObject, plan: Plan) -> Applied:
        """Carry ``plan`` out. Raises ApiError."""


class Applier:
    """Carries out one pool's plans.

    ``live`` returns a child from the watch; ``now`` returns seconds since the epoch.
    """

    def __init__(
        self,
        api: Api,
        recorder: EventRecorder,
        *,
        reservations: ReservationWriter,
        live: Callable[[str, Key], ChildObject | None],
        now: Callable[[], float],
    ) -> None:
        self._api = api
        self._recorder = recorder
        self._reservations = reservations
        self._live = live
        self._now = now
        self._log = get_logger(__name__)
        self._applied: dict[str, tuple[str, str]] = {}

    async def apply(self, pool: PoolObject, plan: Plan) -> Applied:
        """Carry ``plan`` out.

        If a child, reservation, gate or restart fails, its error is returned and the other steps continue. The ring
        must follow the pods in any case. An exception ends the plan. Raises ConflictError if the pool or the
        reservations have changed, and GoneError if the pool no longer exists. Raises ApiError if the pool's status
        cannot be written, and NotLeadingError if this operator may not write.
        """
        metadata = pool.document["metadata"]
        refused = await _all(self._apply_child(child, pool.uid) for child in plan.children)
        sized = not any(
            words and child["kind"] == "StatefulSet" for child, words in zip(plan.children, refused, strict=True)
        )
        refused.append(await self._reserve(metadata["namespace"], plan.reserve))
        before, after = status_document(pool.status), status_document(plan.status)
        if before != after:
            await self._api.write_status(
                metadata["namespace"],
                metadata["name"],
                merge_patch(before, after),
                resource_version=pool.resource_version,
            )
        refused += _shortened(await self._set_gates(metadata["namespace"], plan.gates))
        refused += [await self._restart(metadata["namespace"], restart) for restart in plan.restarts]
        for event in plan.events:
            if sized or event.reason not in _SCALING:
                await self._recorder.post(pool, event)
        return Applied(refused=tuple(words for words in refused if words), wrote_status=before != after)

    async def _apply_child(self, child: Mapping[str, Any], uid: str) -> str:
        """Apply one child unless it is unchanged; return the error, or an empty text."""
        kind, metadata = child["kind"], child["metadata"]
        wanted = hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()
        live = self._live(kind, (metadata["namespace"], metadata["name"]))
        if live is not None and self._applied.get(kind) == (wanted, live.fingerprint):
            return ""
        try:
            if live is None:
                # The child does not exist or lacks our label: the watch returns labelled objects only.
                found = await self._api.find(child)
                live = None if found is None else read_child(found)
            if live is not None and not live.belongs_to(uid):
                return (
                    f"{kind} {metadata['namespace']}/{metadata['name']} exists and is not controlled by this pool; "
                    f"delete this {kind}, or give the pool another name"
                )
            made = await self._api.apply_child(child)
        except ApiError as error:
            return _refusal(error)
        self._applied[kind] = (wanted, fingerprint(made))
        return ""

    async def _reserve(self, namespace: str, names: Sequence[str]) -> str:
        """Reserve model names; return the error, or an empty text."""
        if not names:
            return ""
        try:
            await self._reservations.reserve(namespace, names)
        except ConflictError:
            raise  # The ConfigMap was written at the same time; the next reconcile retries soon.
        except ApiError as error:
            return _refusal(error)
        return ""

    async def _set_gates(self, namespace: str, gates: Sequence[Gate]) -> list[str]:
        """Set gates concurrently: a pool may have a thousand gates, and the next reconcile waits for all of them."""
        turns = asyncio.Semaphore(_AT_A_TIME)

        async def set_gate(gate: Gate) -> str:
            async with turns:
                try:
                    await self._api.set_gate(namespace, gate, self._now())
                except (ConflictError, GoneError):
                    return ""  # The pod was replaced or deleted; the watch will report the change.
                except ApiError as error:
                    return _refusal(error)
                return ""

        return await _all(set_gate(gate) for gate in gates)

    async def _restart(self, namespace: str, restart: Restart) -> str:
        self._log.info("Deleting outdated pod", pod=f"{namespace}/{restart.pod}")
        try:
            await self._api.restart_pod(namespace, restart)
        except (ConflictError, GoneError):
            return ""  # The pod was replaced or deleted; the watch will report the change.
        except ApiError as error:
            return _refusal(error)
        return ""


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch that turns ``before`` into ``after``: removed fields become null."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge_patch(old, value)
        patch[key] = value
    return patch


async def _all(works: Iterable[Coroutine[Any, Any, str]]) -> list[str]:
    """Return the results of all coroutines; wait for all of them, even if one raises."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    results: list[str] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _shortened(refused: Iterable[str]) -> list[str]:
    """Return the first few errors and the number of further errors."""
    errors = [error for error in refused if error]
    more = len(errors) - _NAMED
    return [*errors[:_NAMED], f"and {more} more errors"] if more > 0 else errors


def _refusal(error: ApiError) -> str:
    """Return the error's message; raise ``error`` if this operator is not the leader."""
    if isinstance(error, NotLeadingError):
        raise error
    return str(error)
