"""What observes requests and engines: metrics, demand, the dashboard with its histories, tracing, engines' reports."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from dualmap.engines.profile import EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceStatus
from dualmap_extproc.app.recording import start_recording
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.engines.kv_events import KvEvents
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.engines.profiles import EngineProfiles
from dualmap_extproc.recording.recorder import REQUEST_ID, Recorder
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Settings, TracingError
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.dashboard.snapshot import SnapshotInputs
from dualmap_extproc.telemetry.dashboard.verdict import Reach
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.telemetry.pool_log import log_pool_events

_VERSION: Final = version("dualmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The subscribers to the observations that ``observations`` passes on.

    ``histories`` is None without the dashboard, and ``recorder`` without a recording. Spans and the recording need the
    ``headers``. ``close_tracing`` exports the pending spans; it blocks, for three seconds at most.
    """

    observations: FanOut
    metrics: Metrics
    demand: Demand
    histories: Histories | None
    recorder: Recorder | None
    headers: frozenset[str]
    close_tracing: Callable[[], None]


def observers_of(settings: Settings) -> Observers:
    """Return the subscribers that the settings ask for. Raises RecordingError and TracingError."""
    observations = FanOut()
    demand, metrics = Demand(), Metrics(version=_VERSION, replica_id=settings.replica_id)
    histories = Histories() if settings.dashboard else None
    for subscriber in (metrics, demand, histories):
        if subscriber is not None:
            subscriber.subscribe(observations)
    log_pool_events(observations)
    headers, close_tracing = _tracing(settings, observations)
    recorder = start_recording(settings, observations, metrics, version=_VERSION)
    if recorder is not None:
        headers |= {REQUEST_ID}
    return Observers(
        observations=observations,
        metrics=metrics,
        demand=demand,
        histories=histories,
        recorder=recorder,
        headers=headers,
        close_tracing=close_tracing,
    )


def _tracing(settings: Settings, observations: FanOut) -> tuple[frozenset[str], Callable[[], None]]:
    """Set up tracing if it is enabled; return the headers that spans need and a function that exports pending spans."""
    if settings.otlp_endpoint is None:
        return frozenset(), lambda: None
    # The import is here because OpenTelemetry is an optional dependency and takes time to import.
    try:
        from dualmap_extproc.telemetry.tracing import TRACE_HEADERS, tracing_to
    except ValueError as error:
        # OpenTelemetry reads some of its settings during its import.
        raise TracingError(f"invalid OTEL_* environment variables: {error}") from error

    tracing = tracing_to(settings.otlp_endpoint, replica_id=settings.replica_id, version=_VERSION)
    tracing.subscribe(observations)
    return TRACE_HEADERS, tracing.close


def engine_reports(picker: Picker, metrics: Metrics) -> tuple[EngineProfiles, KvEvents]:
    """Return the clients of the members' engines, which report profiles and KV events to the picker."""
    clock = asyncio.get_running_loop().time

    def take_profile(pool: str, member: str, profile: EngineProfile) -> None:
        picker.on_profile(clock(), pool, member, profile)
        kv_events.on_profile(pool, member, profile)

    def take_kv_events(pool: str, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        picker.on_kv_events(pool, member, rank, changes, status)

    profiles, kv_events = EngineProfiles(take_profile), KvEvents(take_kv_events, KvEventMetrics(metrics.registry))
    return profiles, kv_events


def dashboard_of(
    router: str,
    picker: Picker,
    pool_demand: PoolDemand,
    histories: Histories,
    *,
    store_lost_s: Callable[[], float | None],
    watch_ages_s: Callable[[], Mapping[str, float]],
    kv_store_lost: Callable[[str], bool],
) -> Dashboard:
    """Return the dashboard of a router.

    ``store_lost_s`` returns the seconds since the last answer of an unreachable Redis (else None), and ``watch_ages_s``
    those since the last answer about each resource that the source of pools watches. ``kv_store_lost`` returns whether
    a pool's KV store is left alone.
    """
    inputs = SnapshotInputs(
        router=router,
        version=_VERSION,
        pools=lambda: picker.pools,
        statuses=picker.statuses,
        demand=pool_demand.total,
        histories=histories,
        clock=time.time,
        reach=lambda pool: Reach(
            store_lost_s=store_lost_s(), watch_ages_s=watch_ages_s(), kv_store_lost=kv_store_lost(pool)
        ),
    )
    return Dashboard(inputs)
