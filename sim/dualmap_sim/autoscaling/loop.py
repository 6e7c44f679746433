"""One run of a pool with an autoscaler. The input is a list of requests; the results are records and fleet history.

``cluster.Cluster`` runs the real router and the engine model. This module adds the control loop. A meter computes the
desired instances, and the HPA decides every 15 s. Pods then start and join, or drain and stop. ``hpa``, ``fleet`` and
``meters`` are components of the loop, and ``figures`` measures the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken, PoolSnapshot
from dualmap.shared_router import Router, SharedRouter
from dualmap_sim.arrivals import Arrival
from dualmap_sim.autoscaling.fleet import IDLE_CHECK_S, Fleet, Pod
from dualmap_sim.autoscaling.hpa import SYNC_S, Hpa, HpaSpec
from dualmap_sim.autoscaling.meters import OnSlo, Scaler
from dualmap_sim.cluster import Cluster, ClusterConfig, Replica, ReplicationConfig
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import Record
from dualmap_sim.timeline import Timeline

_SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaled:
    """The settings of a pool with an autoscaler. ``first`` is the initial number of instances.

    ``pool`` has all settings except the members. ``start_s`` is the time that a pod needs to start. ``lasts_s`` is the
    minimum duration of the run. From the first to the second time of ``blind_s`` the HPA gets no metric. ``exchange``
    is the replication between several ``routers``. ``hop_delay_s`` is the delay of a message between two routers, if
    the pool's owner decides for all of them. With None, each router decides by itself.
    """

    pool: Pool
    engine: EngineConfig
    first: int
    scaler: Scaler | None = field(default=OnSlo())
    hpa: HpaSpec = field(default=HpaSpec())
    start_s: float = 120.0
    routers: int = 1
    exchange: ReplicationConfig = field(default=ReplicationConfig())
    hop_delay_s: float | None = 0.001
    lasts_s: float = 0.0
    blind_s: tuple[float, float] = (inf, inf)
    feedback_delay_s: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """The fleet after a sync. ``desired`` is None without a metric or a scaler."""

    at_s: float
    desired: float | None
    requested: int
    present: int
    serving: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of a run. ``pods`` includes the deleted pods. ``ended_s`` is the time the run ended."""

    records: tuple[Record, ...]
    syncs: tuple[Sync, ...]
    pods: tuple[Pod, ...]
    ended_s: float


def run_autoscaled(config: Autoscaled, arrivals: Sequence[Arrival]) -> Run:
    """Replay the requests until the last request has ended and ``lasts_s`` has passed."""
    loop = _Loop(config)
    cluster = Cluster(
        ClusterConfig(
            pool=loop.pool,
            engine=config.engine,
            replicas=(Replica(),) * config.routers,
            exchange=config.exchange if config.routers > 1 else None,
            hop_delay_s=config.hop_delay_s if config.routers > 1 else None,
            feedback_delay_s=config.feedback_delay_s,
            lasts_s=config.lasts_s,
        ),
        observer=loop,
    )
    records = cluster.run(arrivals)
    return Run(records=records, syncs=tuple(loop.syncs), pods=tuple(loop.fleet.pods), ended_s=loop.now_s)


class _Loop:
    """Observes one run and scales its pool."""

    def __init__(self, config: Autoscaled) -> None:
        self._config = config
        self.fleet = Fleet(config.first, start_s=config.start_s)
        self.syncs: list[Sync] = []
        self._hpa = Hpa(config.hpa)
        self._meter = None if config.scaler is None else config.scaler.meter(config.pool, routers=config.routers)
        self.pool = replace(config.pool, members=self.fleet.members(0.0), ring_version=1)
        self._timeline: Timeline
        self._routers: Sequence[Router] = ()
        self._publish: Callable[[Pool], None]
        self._is_check_due = False
        # The time of the next publication of the ring. Wake-ups scheduled for other times have no effect.
        self._changes_s = inf

    @property
    def now_s(self) -> float:
        """The run's current time."""
        return self._timeline.now_s

    def begin(self, timeline: Timeline, routers: Sequence[Router], publish: Callable[[Pool], None]) -> None:
        """Schedule the first sync and the first sample."""
        self._timeline, self._routers, self._publish = timeline, routers, publish
        timeline.at(SYNC_S, self._sync, SYNC_S, ticks=True)
        timeline.at(0.0, self._sample, _SAMPLE_S, ticks=True)

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """Count the routed request in the meter."""
        if self._meter is not None:
            self._meter.routed(now, router, receipt)

    def held(self, now: float, router: int) -> None:
        """Count the queued request in the meter."""
        if self._meter is not None:
            self._meter.held(now, router)

    def refused(self, now: float, router: int) -> None:
        """Count the rejected request in the meter."""
        if self._meter is not None:
            self._meter.refused(now, router)

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """Count the first token in the meter."""
        if self._meter is not None:
            self._meter.first_token(now, router, first_token)

    def _sample(self, every_s: float) -> None:
        if self._meter is not None:
            self._timeline.at(self.now_s + every_s, self._sample, every_s, ticks=True)
            self._meter.sample(self._demands())

    def _sync(self, every_s: float) -> None:
        now, fleet = self.now_s, self.fleet
        self._timeline.at(now + every_s, self._sync, every_s, ticks=True)
        desired = None
        if self._meter is not None:
            began_s, ended_s = self._config.blind_s
            seen = self._meter.desired_replicas(now, self._demands())
            desired = None if began_s <= now < ended_s else seen
            requested = self._hpa.sync(now, desired, requested=fleet.requested, present=fleet.present)
            if requested != fleet.requested:
                fleet.scale(now, requested)
                self._refresh()
                self._schedule_idle_check()
        self.syncs.append(
            Sync(at_s=now, desired=desired, requested=fleet.requested, present=fleet.present, serving=fleet.serving)
        )

    def _demands(self) -> list[PoolSnapshot]:
        """Return each router's share of the pool's demand."""
        return [router.demand() if isinstance(router, SharedRouter) else router.status() for router in self._routers]

    def _refresh(self) -> None:
        """Publish the ring if it has changed, and schedule the next change that depends on time."""
        now = self.now_s
        members = self.fleet.members(now)
        if members != self.pool.members:
            self.pool = replace(self.pool, members=members, ring_version=self.pool.ring_version + 1)
            if self._meter is not None:
                self._meter.adopt(self.pool)
            self._publish(self.pool)
        due_s = self.fleet.next_change_s(now)
        if due_s is not None and due_s != self._changes_s:
            self._changes_s = due_s
            self._timeline.at(due_s, self._change, due_s, ticks=True)

    def _change(self, due_s: float) -> None:
        if due_s == self._changes_s:
            self._changes_s = inf
            self._refresh()

    def _schedule_idle_check(self) -> None:
        if self.fleet.draining and not self._is_check_due:
            self._is_check_due = True
            self._timeline.at(self.now_s + IDLE_CHECK_S, self._check_idle, self.fleet, ticks=True)

    def _check_idle(self, fleet: Fleet) -> None:
        """Check which draining members have no requests at any router, and apply the result."""
        self._is_check_due = False
        busy = {
            endpoint.id
            for router in self._routers
            for endpoint in router.status().endpoints
            if endpoint.in_flight + endpoint.held
        }
        fleet.check_idle(self.now_s, [member for member in fleet.draining if member not in busy])
        self._refresh()
        self._schedule_idle_check()
