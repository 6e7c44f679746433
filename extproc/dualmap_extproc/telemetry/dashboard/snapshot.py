"""Makes the dashboard's snapshots: the state of one pool as JSON, with the verdict on every pool.

Each snapshot is complete, so that a page may miss earlier snapshots. A snapshot contains loads, counts and reasons. A
snapshot never contains addresses, prompts, hashes of prompts, sessions or headers.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from dualmap.engines.profile import EngineProfile
from dualmap.engines.source import SourceState
from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Pool
from dualmap.requests import Decision, EventsStatus, PoolSnapshot
from dualmap.scaling.reports import Share
from dualmap_extproc.autoscaling.pool_demand import DemandUnknown
from dualmap_extproc.names import replica_of
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.history import (
    DECISIONS,
    STEP_S,
    TTFT_BOUNDS_S,
    EndpointPast,
    Happening,
    HistoryView,
    Recent,
)
from dualmap_extproc.telemetry.dashboard.verdict import Reach, Verdict, backlog_s, judge, shortened, telling

_DIGITS: Final = 4
"""The decimal places of seconds and shares. More digits have no meaning and would be most of a snapshot's size."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInputs:
    """The inputs of a snapshot: this router's name and version, its pools, their statuses and histories.

    ``demand`` returns a pool's demand, summed over all routers, or raises DemandUnknown. ``clock`` returns the time in
    seconds since 1970. ``reach`` returns which of the other systems of a pool answer.
    """

    router: str
    version: str
    pools: Callable[[], Sequence[Pool]]
    statuses: Callable[[], Sequence[PoolSnapshot]]
    demand: Callable[[str], Share]
    histories: Histories
    clock: Callable[[], float]
    reach: Callable[[str], Reach] = lambda _: Reach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The inputs of one pool's snapshot, read at the same time.

    ``share`` is None if the demand over all routers is unknown; ``unknown`` then gives the reason.
    """

    pool: Pool
    status: PoolSnapshot
    past: HistoryView
    reach: Reach
    share: Share | None
    unknown: str

    def verdict(self) -> Verdict:
        """Return the verdict on the pool."""
        wanted = None if self.share is None else self.share.desired_replicas
        return judge(self.pool, self.status, self.past, self.reach, wanted=wanted, unknown=self.unknown)


class Snapshots:
    """A factory for snapshots, in two steps: ``look`` is fast; ``tell`` takes longer and may run in another thread.

    The object caches ring shares, which change only with the members.
    """

    def __init__(self, source: SnapshotInputs) -> None:
        self._source = source
        self._shares: dict[str, tuple[Pool, frozenset[str], tuple[Mapping[str, float], Mapping[str, float]]]] = {}

    def look(self) -> tuple[Moment, ...]:
        """Return the current inputs of every pool; must run in the event loop's thread."""
        pools = {pool.id: pool for pool in self._source.pools()}
        return tuple(
            self._moment(pools[status.pool], status) for status in self._source.statuses() if status.pool in pools
        )

    def tell(self, moments: Sequence[Moment], wanted: Collection[str]) -> dict[str, bytes]:
        """Return a JSON document for each of the ``wanted`` pools, including unknown pools.

        The empty name means the first pool. Only one thread at a time may call this method.
        """
        pools = {moment.pool.id: moment for moment in moments}
        self._shares = {name: known for name, known in self._shares.items() if name in pools}
        verdicts = {name: moment.verdict() for name, moment in pools.items()}
        overview = [
            {"pool": name, "level": verdict.level, "headline": verdict.headline} for name, verdict in verdicts.items()
        ]
        documents = {}
        for asked in wanted:
            name = asked or next(iter(pools), "")
            document = {
                "router": self._source.router,
                "version": self._source.version,
                "at": round(self._source.clock(), 1),
                "pools": overview,
                "asked": asked,
                "pool": self._pool(pools[name], verdicts[name]) if name in pools else None,
            }
            documents[asked] = json.dumps(document, separators=(",", ":")).encode()
        return documents

    def _moment(self, pool: Pool, status: PoolSnapshot) -> Moment:
        past, reach = self._source.histories.view(pool.id), self._source.reach(pool.id)
        share, unknown = None, ""
        try:
            share = self._source.demand(pool.id)
        except DemandUnknown as error:
            unknown = str(error)
        return Moment(pool=pool, status=status, past=past, reach=reach, share=share, unknown=unknown)

    def _pool(self, moment: Moment, verdict: Verdict) -> Json:
        pool, status, past = moment.pool, moment.status, moment.past
        return {
            "name": pool.id,
            "model": pool.model.name or "any model",
            "policy": pool.routing.policy,
            "algorithm": pool.routing.ring.algorithm.value,
            "ring_version": status.ring_version,
            "peers": status.peers,
            "owner": replica_of(status.owner) or self._source.router,
            "sessions": status.sessions,
            "split_prefixes": status.split_prefixes,
            "held": status.held,
            "slo": asdict(pool.slo),
            "verdict": asdict(verdict),
            "all_routers": _share(moment.share),
            "recent": _recent(telling(past)),
            "minute": {"requests": past.minute.requests, "refused": past.minute.refused},
            "hit_rate": {
                "predicted": _short(past.total.hit_rate_predicted),
                "measured": _short(past.total.hit_rate_measured),
            },
            "fetches_kv": pool.fetches_kv,
            "fetched": _short(past.total.fetched),
            "moved_sessions": past.total.moved_sessions,
            "history": _history(past),
            "ttfts": {"bounds_s": [_short(bound) for bound in TTFT_BOUNDS_S], "counts": past.window.ttfts},
            "rules": past.rules,
            "refusals": past.refusals,
            "endpoints": self._endpoints(pool, status, past),
            "kept_decisions": DECISIONS,
            "decisions": [self._happening(each) for each in past.happenings],
        }

    def _endpoints(self, pool: Pool, status: PoolSnapshot, past: HistoryView) -> dict[str, list[object]]:
        """Return the members' values as columns: in rows, repeated field names would be most of a snapshot."""
        ring_1, ring_2 = self._ring_shares(pool, status)
        nothing = EndpointPast()
        endpoints = status.endpoints
        pasts = [past.endpoints.get(each.id, nothing) for each in endpoints]
        return {
            "id": [each.id for each in endpoints],
            "state": ["Suspended" if each.suspended else each.state for each in endpoints],
            "weight": [each.weight for each in endpoints],
            "ring_1": [_short(ring_1.get(each.id, 0.0)) for each in endpoints],
            "ring_2": [_short(ring_2.get(each.id, 0.0)) for each in endpoints],
            "in_flight": [each.in_flight for each in endpoints],
            "held": [each.held for each in endpoints],
            "pending_tokens": [each.pending_prefill_tokens + each.held_prefill_tokens for each in endpoints],
            "backlog_s": [_short(backlog_s(each)) for each in endpoints],
            "speed": [round(each.prefill_tokens_per_second) for each in endpoints],
            "requests": [each.requests for each in pasts],
            "hit_predicted": [_short(each.hit_rate_predicted) for each in pasts],
            "hit_measured": [_short(each.hit_rate_measured) for each in pasts],
            "attainment": [_short(each.attainment) for each in pasts],
            "failed": [each.failed for each in pasts],
            "engine": [_engine(each.engine) for each in endpoints],
            "engine_problem": [shortened(each.engine.problem) for each in endpoints],
            "events": [_events(each.events) for each in endpoints],
            "events_problem": [shortened(each.events.reason) for each in endpoints],
        }

    def _ring_shares(self, pool: Pool, status: PoolSnapshot) -> tuple[Mapping[str, float], Mapping[str, float]]:
        checked = pool.engine.checks_names
        left_out = frozenset(
            each.id
            for each in status.endpoints
            if each.suspended or each.engine.asleep or (checked and each.engine.lacks(pool.model.name))
        )
        known = self._shares.get(pool.id)
        if known is None or known[0] is not pool or known[1] != left_out:
            members = [member for member in pool.members if member.id not in left_out]
            # If all members are left out, the router uses some of them all the same, so their shares are shown.
            shares = DualRing(members or pool.members, pool.routing.ring).shares()
            known = self._shares[pool.id] = (pool, left_out, shares)
        return known[2]

    def _happening(self, happening: Happening) -> Json:
        at = round(self._source.clock() - self._source.histories.age_s(happening.at_s), 1)
        what = happening.what
        if isinstance(what, Decision):
            return {"number": happening.number, "at": at, **_decision(what)}
        return {"number": happening.number, "at": at, "refused": what.code, "reason": what.message}


def _decision(decision: Decision) -> Json:
    receipt = decision.receipt
    return {
        "chosen": receipt.chosen,
        "rule": receipt.rule,
        "reason": receipt.reason,
        "pair": list(receipt.pair),
        "key_blocks": receipt.key.blocks,
        "prompt_tokens": receipt.prompt_tokens,
        "matched_tokens": receipt.matched_tokens,
        "ttft_s": _short(receipt.predicted_ttft_s),
        "candidates": [
            {
                "id": each.id,
                "matched_tokens": each.matched_tokens,
                "pending_tokens": each.pending_tokens,
                "ttft_s": _short(each.ttft_s),
            }
            for each in receipt.candidates
        ],
    }


def _share(share: Share | None) -> Json | None:
    """Return the demand over all routers as JSON, or None if the demand is unknown."""
    if share is None:
        return None
    attainment = share.slo_attainment if share.first_tokens else None
    return {
        "wanted": _short(share.desired_replicas),
        "in_flight": share.in_flight,
        "held": share.held,
        "attainment": _short(attainment),
    }


def _recent(recent: Recent) -> Json:
    return {
        "seconds": recent.seconds,
        "first_tokens": recent.first_tokens,
        "attainment": _short(recent.attainment),
        "ttft_p50_s": _short(recent.ttft_p50_s),
        "ttft_p90_s": _short(recent.ttft_p90_s),
    }


def _history(past: HistoryView) -> Json:
    return {
        "step_s": STEP_S,
        "requests": [step.requests for step in past.steps],
        "refused": [step.refused for step in past.steps],
        "attainment": [_short(step.slo_met / step.first_tokens) if step.first_tokens else None for step in past.steps],
        "ttft_p50_s": [_short(step.ttft_p50_s) for step in past.steps],
        "ttft_p90_s": [_short(step.ttft_p90_s) for step in past.steps],
    }


def _engine(profile: EngineProfile) -> str:
    """Return the engine's version, or what its row says instead."""
    if profile.asleep:
        return "asleep"
    return profile.version if profile.version or not profile.problem else "unknown"


def _events(events: EventsStatus) -> str:
    """Return the state of the KV events, empty for a pool without them."""
    return "" if events.state is SourceState.OFF and not events.reason else events.state.value


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, _DIGITS)
