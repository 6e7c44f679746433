"""Compares one, two and four routers, with different data shared between them and with a router that joins later.

Each router decides by itself, as without a connection to the pool's owner. ``bench.routers`` measures the goodput of
routers for which the owner decides.

``--differences`` prints what each difference between one router and four is worth, near the knee. Its last rows have
an owner, which gives four routers the queue and the accounts of one. Otherwise, in the first section, replicas share
from nothing to all data, every 50 to 1000 ms. In the second section, a router joins running routers. In the third
section, requests have sessions. Session ids and bindings need less data than the full index.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import click
from bench.virtual import (
    CONVERSATION,
    REQUESTS,
    SLO_TTFT_S,
    WARMUP,
    Case,
    percent,
    pool_of,
    run,
    run_all,
    seconds,
    workloads,
)

from dualmap.pools.pool import Queue, Rebalance, Routing, Session, SessionMigration
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate
from dualmap_extproc.store.codec import encode_update
from dualmap_sim.cluster import Record, Replica, ReplicationConfig, everything
from dualmap_sim.messages import LATE_S, owner_number
from dualmap_sim.summary import Summary, summarise

RATES = {"conversation": (3.1,), "default": (7.26, 9.0)}
"""Requests per second. The last rate of each workload is near the maximum. The demo uses a rate of 7.26."""
SAMPLES = (0, 1, 2)
PERIODS_S = (0.05, 0.1, 0.25, 1.0)
USUAL_PERIOD_S = 0.1
FEEDBACK_DELAY_S = 0.01
JOINS_S = 250.0
KNEES = {"conversation": 3.3, "poisson_chats": 5.3}
"""Requests per second below the knee of one router, for the differences between one router and four."""
DIFFERENCES_REQUESTS = 3990
FAST_HOP_S = 0.001
SLOW_HOP_S = 0.01
LATE_HOPS = 0.01
"""The share of messages between routers that take longer than a router waits for an answer."""
LOST_SHARE = 0.5
LONGEST_STALL_S = 1e6
WIDE_WINDOW_S = 1.0
ENDLESS_WINDOW_S = 1e6
BUCKETS_S = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 90.0, 120.0, 180.0)
"""Ends of the time intervals after a router has joined."""
NOTHING_COUNTED = HotnessCounts(requests=0, nodes={})
KEY_BYTES = 8
"""The minimum number of bytes of a session binding's lookup."""


def loads(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep only each replica's load per instance in the update."""
    return ReplicaUpdate(hotness=NOTHING_COUNTED, loads=update.loads)


def loads_and_hotness(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep the loads and the request counts of prefixes in the update."""
    return ReplicaUpdate(hotness=update.hotness, loads=update.loads)


def no_bindings(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep all data except session bindings: loads, hotness and placements."""
    return replace(update, bindings=(), wanted=())


def no_loads(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep all data except the loads."""
    return replace(update, loads=None)


def no_hotness(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep all data except the request counts of prefixes."""
    return replace(update, hotness=NOTHING_COUNTED)


def no_placements(update: ReplicaUpdate) -> ReplicaUpdate:
    """Keep all data except the placements of prompts."""
    return replace(update, placements=())


class NewBlocksOnly:
    """Removes the placements of prompts that an earlier update told with all their blocks for the same endpoint."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()

    def __call__(self, update: ReplicaUpdate) -> ReplicaUpdate:
        """Return the update with the placements of new blocks."""
        placements = tuple(each for each in update.placements if (each.endpoint, each.hashes[-1]) not in self._told)
        self._told.update((each.endpoint, block) for each in placements for block in each.hashes)
        return replace(update, placements=placements)


class Scales:
    """Filters updates and counts their bytes as written to Redis."""

    def __init__(self, carries: Callable[[ReplicaUpdate], ReplicaUpdate]) -> None:
        self.bytes = 0
        self._carries = carries

    def __call__(self, update: ReplicaUpdate) -> ReplicaUpdate:
        """Return the filtered update, and count its bytes."""
        carried = self._carries(update)
        self.bytes += len(encode_update(carried)) + KEY_BYTES * len(carried.wanted)
        return carried


KINDS = (("loads", loads), ("loads, hotness", loads_and_hotness), ("loads, hotness, placements", no_bindings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A run's figures, the bytes per request that all routers together wrote, and the processor time of the run."""

    summary: Summary
    bytes_per_request: float
    cost_s: float


@dataclass(slots=True)
class Reuse:
    """The prompt tokens of some requests, and the number of cached tokens among them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, record: Record) -> None:
        """Count a request if it was served."""
        if record.first_token_s is not None:
            self.prompt_tokens += record.arrival.work.prompt_tokens
            self.cached_tokens += record.cached_tokens


@click.command()
@click.option("--quick", is_flag=True, help="Measure a small part of every section, or one sample of the differences.")
@click.option("--differences", is_flag=True, help="Measure only the differences between one router and four.")
def main(quick: bool, differences: bool) -> None:
    """Simulate pools with one to four routers in virtual time, and print the tables."""
    samples = SAMPLES[:1] if quick else SAMPLES
    if differences:
        for workload, rate in KNEES.items():
            if workload != "conversation" or CONVERSATION.exists():
                _differences(workload, rate, samples)
        return
    for workload in workloads():
        first, *others = RATES[workload]
        _sharing(workload, first, samples, (USUAL_PERIOD_S,) if quick else PERIODS_S)
        for rate in () if quick else others:
            _sharing(workload, rate, samples, (USUAL_PERIOD_S,))
        for warm in (1,) if quick else (1, 3):
            _cold(workload, RATES[workload][-1], samples, warm)
        _sessions(workload, RATES[workload][-1], samples, (4,) if quick else (1, 4))


def weigh(case: Case) -> Weighed:
    """Run a case, count the bytes of its replication, and measure its processor time."""
    scales = None if case.exchange is None else Scales(case.exchange.carries)
    if case.exchange is not None and scales is not None:
        case = replace(case, exchange=replace(case.exchange, carries=scales))
    began_s = time.process_time()
    records = run(case)
    cost_s = time.process_time() - began_s
    return Weighed(
        summary=summarise(records[WARMUP:], slo_ttft_s=SLO_TTFT_S),
        cost_s=cost_s,
        bytes_per_request=0.0 if scales is None else scales.bytes / len(records),
    )


def after_join(case: Case) -> tuple[tuple[Reuse, Reuse], ...]:
    """Run a case whose last router joins at JOINS_S. Return its reuse and that of the others for each of BUCKETS_S."""
    buckets = tuple((Reuse(), Reuse()) for _ in BUCKETS_S)
    joined = len(case.replicas) - 1
    for record in run(case):
        since_s = record.arrival.at_s - JOINS_S
        if 0.0 <= since_s < BUCKETS_S[-1]:
            bucket = next(number for number, end_s in enumerate(BUCKETS_S) if since_s < end_s)
            buckets[bucket][0 if record.router == joined else 1].add(record)
    return buckets


def _differences(workload: str, rate: float, samples: Sequence[int]) -> None:
    def four(exchange: ReplicationConfig | None) -> list[Case]:
        return _cases(workload, rate, samples, routers=4, exchange=exchange, requests=DIFFERENCES_REQUESTS)

    def every(period_s: float) -> list[Case]:
        return four(_exchange(everything, period_s))

    usual, unshared = every(USUAL_PERIOD_S), four(None)
    patient = replace(Routing(), rebalance=Rebalance(decode_stall_s=LONGEST_STALL_S))
    wide = replace(Routing(), queue=Queue(dispatch_window_s=WIDE_WINDOW_S))
    # Each case has a filter of its own, because the filter remembers what it has seen.
    new_blocks = [replace(case, exchange=_exchange(NewBlocksOnly(), USUAL_PERIOD_S)) for case in usual]
    one = _cases(workload, rate, samples, requests=DIFFERENCES_REQUESTS)
    rows = [
        ("1 | -", one),
        ("4 | everything, every 100 ms", usual),
        ("4 | everything, every 20 ms", every(0.02)),
        ("4 | everything, every 5 ms", every(0.005)),
        ("4 | no prompts that add no blocks, every 100 ms", new_blocks),
        ("4 | no placements, every 100 ms", four(_exchange(no_placements, USUAL_PERIOD_S))),
        ("4 | no counts of prefixes, every 100 ms", four(_exchange(no_hotness, USUAL_PERIOD_S))),
        ("4 | no loads, every 100 ms", four(_exchange(no_loads, USUAL_PERIOD_S))),
        ("4 | everything, no stalls are detected", [replace(case, routing=patient) for case in usual]),
        ("4 | everything, dispatch window 1 s", [replace(case, routing=wide) for case in usual]),
        ("4 | nothing", unshared),
        ("4 | nothing, engines report their load", [replace(each, discovery=True) for each in unshared]),
        *_with_owner(usual),
        *_without_differences(one, usual),
    ]
    print(f"## {workload} at {rate}/s: differences between one router and four\n")
    _table("routers | shared", rows)


def _with_owner(usual: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """Return the rows in which the pool's owner decides for all routers."""
    fast = [replace(case, hop_delay_s=FAST_HOP_S) for case in usual]
    slow = [replace(case, hop_delay_s=SLOW_HOP_S) for case in usual]
    late = [replace(case, late_hops=LATE_HOPS) for case in fast]
    lost = [replace(case, replicas=_without_owner(case)) for case in fast]
    return [
        (f"4 | the owner decides, {1000 * FAST_HOP_S:g} ms away", fast),
        (f"4 | the owner decides, {1000 * SLOW_HOP_S:g} ms away", slow),
        (f"4 | the owner decides, {LATE_HOPS:.0%} of messages take {1000 * LATE_S:g} ms", late),
        (f"4 | the owner decides, and is lost after {LOST_SHARE:.0%} of the run", lost),
    ]


def _without_differences(one: Sequence[Case], four: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """Return pairs of rows, one router and four, both without something that each router has or learns by itself."""
    changes: dict[str, Callable[[Case], Case]] = {
        "in order of arrival": lambda case: replace(case, routing=replace(Routing(), queue=Queue(max_overtaken=0))),
        "no dispatch window": lambda case: replace(
            case, routing=replace(Routing(), queue=Queue(dispatch_window_s=ENDLESS_WINDOW_S))
        ),
        "KV memory not known": lambda case: replace(case, kv_tokens_known=False),
        "prefill times known": lambda case: replace(case, times_known=True),
    }
    rows = []
    for name, change in changes.items():
        rows.append((f"1 | -, {name}", [change(case) for case in one]))
        rows.append((f"4 | everything, {name}", [change(case) for case in four]))
    return rows


def _without_owner(case: Case) -> tuple[Replica, ...]:
    """Return the case's routers, of which the owner is lost after a part of the run."""
    lost_s = LOST_SHARE * case.requests / case.rate
    owner = owner_number(pool_of(case.routing), len(case.replicas))
    return tuple(replace(each, lost_s=lost_s) if n == owner else each for n, each in enumerate(case.replicas))


def _sharing(workload: str, rate: float, samples: Sequence[int], periods_s: Sequence[float]) -> None:
    rows = [("1 | - | -", _cases(workload, rate, samples))]
    for routers in (2, 4):
        rows.append((f"{routers} | nothing | -", _cases(workload, rate, samples, routers=routers)))
        for (name, carries), period_s in product(KINDS, periods_s):
            if period_s != USUAL_PERIOD_S and (routers == 2 or carries is loads):
                continue
            cases = _cases(workload, rate, samples, routers=routers, exchange=_exchange(carries, period_s))
            rows.append((f"{routers} | {name} | {1000 * period_s:g}", cases))
    print(f"## {workload} at {rate}/s: what is shared, and how often\n")
    _table("routers | shared | every ms", rows)


def _cold(workload: str, rate: float, samples: Sequence[int], warm: int) -> None:
    kinds = (
        ("nothing, nor are the others", None, 0.0),
        ("loads, hotness", loads_and_hotness, 0.0),
        ("loads, hotness, with a replay of 60 s", loads_and_hotness, 60.0),
        ("loads, hotness, placements", no_bindings, 0.0),
        ("loads, hotness, placements, with a replay of 60 s", no_bindings, 60.0),
        ("loads, hotness, placements, with a replay of all 250 s", no_bindings, JOINS_S),
    )
    requests = round(rate * (JOINS_S + BUCKETS_S[-1]))
    cases = []
    for _, carries, replay_s in kinds:
        exchange = None if carries is None else _exchange(carries, USUAL_PERIOD_S)
        for case in _cases(workload, rate, samples, routers=warm, exchange=exchange):
            joins = Replica(at_s=JOINS_S, replay_s=replay_s)
            cases.append(replace(case, replicas=(*case.replicas, joins), requests=requests))
    results = iter(run_all(after_join, cases))
    print(f"## {workload} at {rate}/s: a cold router joins {warm} warm\n")
    print("Hit rate (%) of the cold router's requests / of the others' in the same seconds after it joined;")
    print(f"{len(samples)} runs added up.\n")
    print(f"| it is told | {' | '.join(f'to {end_s:g} s' for end_s in BUCKETS_S)} |")
    print(f"|{'---|' * (len(BUCKETS_S) + 1)}")
    for name, _, _ in kinds:
        runs = [next(results) for _ in samples]
        cells = (
            f"{_hit_percent([run[number][0] for run in runs])} / {_hit_percent([run[number][1] for run in runs])}"
            for number in range(len(BUCKETS_S))
        )
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def _sessions(workload: str, rate: float, samples: Sequence[int], numbers: Sequence[int]) -> None:
    kinds = (
        ("by prefix", False, False, no_bindings),
        ("by prefix, placements not shared", False, False, loads_and_hotness),
        ("by session", True, False, everything),
        ("by session, placements not shared", True, False, no_placements),
        ("by session, bindings not shared", True, False, no_bindings),
        ("by session, EAR's move rule", True, True, everything),
        ("by session, EAR's move rule, placements not shared", True, True, no_placements),
    )
    rows = []
    for routers, (name, sessions, migration, carries) in product(numbers, kinds):
        if routers > 1 or "not shared" not in name:
            exchange = _exchange(carries, USUAL_PERIOD_S) if routers > 1 else None
            cases = _cases(workload, rate, samples, routers=routers, exchange=exchange)
            routing = Routing(session=Session(migration=SessionMigration(enabled=migration)))
            rows.append((f"{routers} | {name}", [replace(case, sessions=sessions, routing=routing) for case in cases]))
    print(f"## {workload} at {rate}/s: sessions\n")
    _table("routers | keys", rows)


def _exchange(carries: Callable[[ReplicaUpdate], ReplicaUpdate], period_s: float) -> ReplicationConfig:
    """Return settings in which replicas read updates as often as they write them. The mean delay is half a period."""
    return ReplicationConfig(period_s=period_s, delay_s=period_s / 2, carries=carries)


def _cases(
    workload: str,
    rate: float,
    samples: Sequence[int],
    *,
    routers: int = 1,
    exchange: ReplicationConfig | None = None,
    requests: int = REQUESTS,
) -> list[Case]:
    return [
        Case(
            workload=workload,
            sample=sample,
            rate=rate,
            replicas=(Replica(),) * routers,
            exchange=exchange,
            feedback_delay_s=FEEDBACK_DELAY_S,
            requests=requests,
        )
        for sample in samples
    ]


def _table(heads: str, rows: Sequence[tuple[str, list[Case]]]) -> None:
    columns = "hit rate % | within SLO % | TTFT p50 s | p90 s | held % | written bytes a request | processor s a run"
    results = iter(run_all(weigh, [case for _, cases in rows for case in cases]))
    print(f"| {heads} | {columns} |")
    print(f"|{'---|' * (heads.count('|') + columns.count('|') + 2)}")
    for name, cases in rows:
        weighed = [next(results) for _ in cases]
        summaries = [each.summary for each in weighed]
        cells = (
            percent(each.hit_rate for each in summaries),
            percent(each.slo_attainment for each in summaries),
            seconds(each.ttft_p50_s for each in summaries),
            seconds(each.ttft_p90_s for each in summaries),
            percent(each.held_share for each in summaries),
            f"{fmean(each.bytes_per_request for each in weighed):.0f}",
            f"{fmean(each.cost_s for each in weighed):.1f}",
        )
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def _hit_percent(parts: Sequence[Reuse]) -> str:
    prompt_tokens = sum(part.prompt_tokens for part in parts)
    return f"{100 * sum(part.cached_tokens for part in parts) / prompt_tokens:.0f}" if prompt_tokens else "-"
