"""Replicas that exchange updates through a store, for the tests of replication."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import builders
from dualmap.pools.pool import Pool
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import Report, Share
from dualmap_extproc.store.contract import Failure, Store
from dualmap_extproc.store.exchange import Exchange

POOL = builders.pool()
LOADS = {"m-0": SharedLoad(in_flight=1)}
QUIET = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}))
REPORT = Report(own=Share(desired_replicas=0.5, held=1), pool=Share(desired_replicas=1.5, held=1))


class Replica:
    """A fake picker with a pool's demand.

    Returns the test's values in ``news`` and ``due``, and records received updates.
    """

    def __init__(self, *pools: Pool) -> None:
        self.pools = pools or (POOL,)
        self.update = dict.fromkeys((pool.id for pool in self.pools), QUIET)
        self.heard: list[tuple[str, str, ReplicaUpdate, float]] = []
        self.bindings: list[tuple[str, SharedBinding]] = []
        self.due: dict[str, Report] = {}
        self.peers: list[tuple[str, str, float]] = []
        self.reports_heard: list[tuple[str, str, Report, float]] = []
        self.exchanges = 0

    def take_update(self, now: float) -> Sequence[tuple[str, ReplicaUpdate]]:
        taken = [(pool.id, self.update[pool.id]) for pool in self.pools]
        self.update = {pool: replace(QUIET, loads=update.loads) for pool, update in taken}
        return taken

    def on_update(self, now: float, pool: str, peer: str, update: ReplicaUpdate, age_s: float) -> None:
        self.heard.append((pool, peer, update, age_s))

    def on_bindings(self, now: float, pool: str, bindings: Sequence[SharedBinding]) -> None:
        self.bindings += [(pool, binding) for binding in bindings]

    def reports(self, pools: Collection[str]) -> Mapping[str, Report]:
        return {pool: report for pool, report in self.due.items() if pool in pools}

    def reported(self, reports: Mapping[str, Report]) -> None:
        for pool in reports:
            del self.due[pool]

    def on_peer(self, pool: str, peer: str, age_s: float) -> None:
        self.peers.append((pool, peer, age_s))

    def on_report(self, pool: str, peer: str, report: Report, age_s: float) -> None:
        self.reports_heard.append((pool, peer, report, age_s))

    def exchanged(self) -> None:
        self.exchanges += 1

    def tell(self, pool: Pool = POOL, **update: object) -> None:
        self.update[pool.id] = replace(self.update[pool.id], **update)

    def tell_requests(self, requests: int) -> None:
        self.tell(hotness=HotnessCounts(requests=requests, nodes={7: requests}))

    @property
    def requests(self) -> int:
        """Return the number of received requests."""
        return sum(update.hotness.requests for _, _, update, _ in self.heard)

    @property
    def hosts(self) -> list[str]:
        return [binding.host for _, binding in self.bindings]


class Observed:
    """Counts the exchange's reports."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.failures: list[Failure] = []
        self.unreadable_entries = 0
        self.dropped_updates = 0

    def exchanged(self, seconds: float) -> None:
        self.exchanges += 1

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def unreadable(self, count: int) -> None:
        self.unreadable_entries += count

    def dropped(self, count: int) -> None:
        self.dropped_updates += count


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Joined:
    """A replica with its exchange."""

    def __init__(self, name: str, store: Store, clock: Clock | None = None, *pools: Pool) -> None:
        self.name = name
        self.store = store
        self.replica = Replica(*pools)
        self.observed = Observed()
        time = clock or asyncio.get_running_loop().time
        self.exchange = Exchange(
            self.replica, store, self.observed, reporter=self.replica, peer=name, clock=time, shown=name
        )


def binding(host: str, *, session: int = 1, version: int = 0, ago: float = 0.0) -> SharedBinding:
    return SharedBinding(session=session, host=host, tokens=10, version=version, moved_ago_s=ago)
