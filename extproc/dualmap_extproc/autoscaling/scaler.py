"""KEDA's external-push scaler: reports to KEDA whether a pool is active and how many replicas its traffic needs.

The scaler implements KEDA's ``externalscaler.proto`` (2.20) on the router's gRPC port; docs/autoscaling.md describes
the ScaledObject. ``read_trigger`` reads a ScaledObject's metadata. ``Scaler`` is the gRPC service. ``pool_demand``
provides the numbers.
"""

import asyncio
import contextlib
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from dualmap.scaling.reports import Share
from dualmap_extproc.autoscaling.pool_demand import DemandUnknown, PoolDemand
from dualmap_extproc.names import SCALER_SERVICE
from dualmap_extproc.wire import external_scaler_pb2 as wire

# The interval in which a stream checks whether its pool became idle. A stream detects new traffic immediately.
_LOOK_S: Final = 1.0
# The interval in which a stream repeats that its pool is active. KEDA drops a message that it cannot act on, and polls
# only every 30 s.
_REPEAT_S: Final = 5.0
_SHOWN_CHARACTERS: Final = 100
_DEFAULT_METRIC: Final = "desired_replicas"
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
# The limits of a target. KEDA also uses the target as a whole number.
_TARGET_MIN: Final = 0.001
_TARGET_MAX: Final = 1e12
_VALUES: Final[Mapping[str, Callable[[Share], float]]] = {
    _DEFAULT_METRIC: lambda share: share.desired_replicas,
    "pending_prefill_tokens": lambda share: share.pending_prefill_tokens,
    "in_flight_requests": lambda share: share.in_flight,
    "held_requests": lambda share: share.held,
    "slo_attainment": lambda share: share.slo_attainment,
}

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class MetadataError(Exception):
    """A ScaledObject's metadata is invalid; the message names the field, its value and the accepted values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A ScaledObject's trigger: a ``metric`` of a pool (``namespace/name``).

    ``target`` is the metric's value for one replica, or None if the metadata has none.
    """

    pool: str
    metric: str
    target: float | None

    def value(self, share: Share) -> float:
        """Return the metric's value."""
        return _VALUES[self.metric](share)


def read_trigger(reference: wire.ScaledObjectRef) -> Trigger:
    """Return a ScaledObject's trigger. Raises MetadataError.

    Without a namespace in the metadata, the pool is in the ScaledObject's namespace.
    """
    metadata = reference.scaler_metadata
    metric = metadata.get("metric", _DEFAULT_METRIC)
    if metric not in _VALUES:
        raise _refused("metric", metric, f"give one of {', '.join(_VALUES)}")
    return Trigger(
        pool=_read_pool(metadata.get("pool", ""), reference.namespace),
        metric=metric,
        target=_read_target(metadata.get("target", "1" if metric == _DEFAULT_METRIC else None)),
    )


def _read_pool(given: str, namespace: str) -> str:
    parts = given.split("/") if "/" in given else [namespace, given]
    if len(parts) != 2 or not all(parts):
        raise _refused("pool", given, "give NAME or NAMESPACE/NAME of an InferencePool")
    return "/".join(parts)


def _read_target(given: str | None) -> float | None:
    if given is None:
        return None
    target = float(given) if _NUMBER.fullmatch(given) else math.nan
    if not _TARGET_MIN <= target <= _TARGET_MAX:
        accepted = f"give a number from {_TARGET_MIN:g} to {_TARGET_MAX:g}: the metric's target value for one instance"
        raise _refused("target", given, accepted)
    return target


def _refused(field: str, given: str, accepted: str) -> MetadataError:
    shown = given if len(given) <= _SHOWN_CHARACTERS else f"{given[:_SHOWN_CHARACTERS]}..."
    return MetadataError(f"metadata {field}: {shown!r} is not accepted; {accepted}")


class Scaler:
    """The ExternalScaler service. ``demand`` provides the numbers and wakes streams when a pool's traffic begins.

    While a pool is active, its streams repeat the message every ``repeat_s`` seconds.
    """

    def __init__(self, demand: PoolDemand, *, repeat_s: float = _REPEAT_S) -> None:
        self._demand = demand
        self._repeat_s = repeat_s
        self._watching: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._ended = False
        demand.on_change(self._wake)

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service's handler, for registration in grpc.aio."""
        reference, request = wire.ScaledObjectRef.FromString, wire.GetMetricsRequest.FromString
        methods = {
            "IsActive": grpc.unary_unary_rpc_method_handler(
                self._is_active, reference, wire.IsActiveResponse.SerializeToString
            ),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self._stream_is_active, reference, wire.IsActiveResponse.SerializeToString
            ),
            "GetMetricSpec": grpc.unary_unary_rpc_method_handler(
                self._get_metric_spec, reference, wire.GetMetricSpecResponse.SerializeToString
            ),
            "GetMetrics": grpc.unary_unary_rpc_method_handler(
                self._get_metrics, request, wire.GetMetricsResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SCALER_SERVICE, methods)

    @property
    def streams(self) -> int:
        """The number of open streams."""
        return sum(len(streams) for streams in self._watching.values())

    def end_streams(self) -> None:
        """End open streams, and new streams after their first message. KEDA then reconnects to another router."""
        self._ended = True
        for pool in tuple(self._watching):
            self._wake(pool)

    async def _is_active(self, reference: wire.ScaledObjectRef, context: _Context) -> wire.IsActiveResponse:
        trigger = await self._trigger(reference, context)
        try:
            return wire.IsActiveResponse(result=self._demand.active(trigger.pool))
        except DemandUnknown as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))

    async def _stream_is_active(
        self, reference: wire.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[wire.IsActiveResponse]:
        """Send whether the pool is active: immediately, after each change, and repeatedly while the pool is active.

        While the demand is unknown, the last answer stays valid. Without an earlier answer, the stream sends no
        message, because KEDA before 2.20 scales to zero on "inactive".
        """
        trigger = await self._trigger(reference, context)
        said: bool | None = None
        clock = asyncio.get_running_loop().time
        said_s = clock()
        with self._watched(trigger.pool) as changed:
            while True:
                changed.clear()
                if not self._demand.knows(trigger.pool):
                    await _abort_unknown(context, trigger.pool)
                try:
                    active: bool | None = self._demand.active(trigger.pool)
                except DemandUnknown:
                    active = said
                if active is not None and (active != said or (active and clock() - said_s >= self._repeat_s)):
                    said, said_s = active, clock()
                    yield wire.IsActiveResponse(result=active)
                if self._ended:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_S, self._repeat_s)):
                        await changed.wait()

    async def _get_metric_spec(self, reference: wire.ScaledObjectRef, context: _Context) -> wire.GetMetricSpecResponse:
        trigger = await self._trigger(reference, context)
        if trigger.target is None:
            missing = f"metadata target: is missing; give how much {trigger.metric} one instance shall have"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, missing)
        spec = wire.MetricSpec(
            metric_name=trigger.metric, target_size=math.ceil(trigger.target), target_size_float=trigger.target
        )
        return wire.GetMetricSpecResponse(metric_specs=[spec])

    async def _get_metrics(self, request: wire.GetMetricsRequest, context: _Context) -> wire.GetMetricsResponse:
        """Answer UNAVAILABLE if the sum is unknown: without the metric, the HPA keeps the number of replicas."""
        trigger = await self._trigger(request.scaled_object_ref, context)
        try:
            value = trigger.value(self._demand.total(trigger.pool))
        except DemandUnknown as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        metric = wire.MetricValue(metric_name=trigger.metric, metric_value=math.ceil(value), metric_value_float=value)
        return wire.GetMetricsResponse(metric_values=[metric])

    async def _trigger(self, reference: wire.ScaledObjectRef, context: _Context) -> Trigger:
        """Return a call's trigger, or end the call with INVALID_ARGUMENT or NOT_FOUND (a pool that is not served)."""
        try:
            trigger = read_trigger(reference)
        except MetadataError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._demand.knows(trigger.pool):
            await _abort_unknown(context, trigger.pool)
        return trigger

    @contextlib.contextmanager
    def _watched(self, pool: str) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._watching[pool].add(changed)
        try:
            yield changed
        finally:
            self._watching[pool].discard(changed)
            if not self._watching[pool]:
                del self._watching[pool]

    def _wake(self, pool: str) -> None:
        """Wake the streams of a pool, so that they check its state."""
        for changed in self._watching.get(pool, ()):
            changed.set()


async def _abort(context: _Context, code: grpc.StatusCode, details: str) -> NoReturn:
    """End a call with an error."""
    await context.abort(code, details)


async def _abort_unknown(context: _Context, pool: str) -> NoReturn:
    known = "GET /pools on the metrics port lists those it does"
    await _abort(context, grpc.StatusCode.NOT_FOUND, f"this router serves no pool {pool}; {known}")
