"""What the page is told: one pool at one moment, as JSON values, and every pool's verdict for the list of pools.

Each snapshot is whole, so that a page that missed some, or has just come back, needs no other. It tells loads, counts
and reasons; never an address, a prompt, its hash, a session or a header.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from dualmap.pool import Pool
from dualmap.requests import Decision, PoolStatus
from dualmap.rings import DualRing
from dualmap.scaling import PoolSignals
from dualmap_extproc.dashboard.history import (
    DECISIONS,
    STEP_S,
    TTFT_BOUNDS_S,
    EndpointPast,
    Happening,
    HistoryView,
    Recent,
)
from dualmap_extproc.dashboard.recorder import Recorder
from dualmap_extproc.dashboard.verdict import Verdict, backlog_s, judge, telling

_DIGITS: Final = 4
"""Significant digits of times and shares: more mean nothing, and are most of what is sent."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a snapshot comes from: this router's name and version, its pools and what it knows of them.

    ``signals`` is asked with statuses of the moment. ``clock`` gives the time of day in seconds since 1970.
    """

    router: str
    version: str
    pools: Callable[[], Sequence[Pool]]
    statuses: Callable[[], Sequence[PoolStatus]]
    signals: Callable[[Sequence[PoolStatus]], Mapping[str, PoolSignals]]
    recorder: Recorder
    clock: Callable[[], float]


class Snapshots:
    """Makes snapshots; remembers ring shares, which change only with the members."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._shares: dict[str, tuple[Pool, frozenset[str], tuple[Mapping[str, float], Mapping[str, float]]]] = {}

    def take(self, wanted: set[str]) -> dict[str, bytes]:
        """Return a JSON document for each of the ``wanted`` pools, those unknown included; belongs to the event loop.

        The empty name is the first pool's, for a page that has not chosen yet.
        """
        source = self._source
        pools = {pool.id: pool for pool in source.pools()}
        statuses = [status for status in source.statuses() if status.pool in pools]
        signals = source.signals(statuses)
        self._shares = {name: known for name, known in self._shares.items() if name in wanted}
        known = {}
        for status in statuses:
            past = source.recorder.view(status.pool)
            instances = _wanted(status, signals.get(status.pool))
            known[status.pool] = (status, past, judge(pools[status.pool], status, past, wanted=instances), instances)
        overview = [
            {"pool": name, "level": verdict.level, "headline": verdict.headline}
            for name, (_, _, verdict, _) in known.items()
        ]
        documents = {}
        for asked in wanted:
            name = asked or next(iter(known), "")
            about: Json | None = None
            if name in known:
                status, past, verdict, instances = known[name]
                about = self._pool(pools[name], status, past, verdict, instances)
            document = {
                "router": source.router,
                "version": source.version,
                "at": round(source.clock(), 1),
                "pools": overview,
                "asked": asked,
                "pool": about,
            }
            documents[asked] = json.dumps(document, separators=(",", ":")).encode()
        return documents

    def _pool(self, pool: Pool, status: PoolStatus, past: HistoryView, verdict: Verdict, wanted: float | None) -> Json:
        recent = telling(past)
        return {
            "name": pool.id,
            "model": pool.model.name,
            "policy": pool.routing.policy,
            "algorithm": pool.routing.ring.algorithm.value,
            "ring_version": status.ring_version,
            "peers": status.peers,
            "sessions": status.sessions,
            "split_prefixes": status.split_prefixes,
            "held": status.held,
            "slo": asdict(pool.slo),
            "verdict": asdict(verdict),
            "wanted": _short(wanted),
            "recent": _recent(recent),
            "minute": {"requests": past.minute.requests, "refused": past.minute.refused},
            "hit_rate": {
                "predicted": _short(past.total.hit_rate_predicted),
                "measured": _short(past.total.hit_rate_measured),
            },
            "history": _history(past),
            "ttfts": {"bounds_s": [_short(bound) for bound in TTFT_BOUNDS_S], "counts": past.window.ttfts},
            "rules": past.rules,
            "refusals": past.refusals,
            "endpoints": self._endpoints(pool, status, past),
            "kept_decisions": DECISIONS,
            "decisions": [self._happening(each) for each in past.happenings],
        }

    def _endpoints(self, pool: Pool, status: PoolStatus, past: HistoryView) -> dict[str, list[object]]:
        """Return the instances as columns: a row of names each would be most of what is sent."""
        ring_1, ring_2 = self._ring_shares(pool, status)
        nothing = EndpointPast()
        rows: list[Json] = []
        for each in status.endpoints:
            lately = past.endpoints.get(each.id, nothing)
            rows.append(
                {
                    "id": each.id,
                    "state": "Suspended" if each.suspended else each.state,
                    "weight": each.weight,
                    "ring_1": _short(ring_1.get(each.id, 0.0)),
                    "ring_2": _short(ring_2.get(each.id, 0.0)),
                    "in_flight": each.in_flight,
                    "held": each.held,
                    "pending_tokens": each.pending_prefill_tokens + each.held_prefill_tokens,
                    "backlog_s": _short(backlog_s(each)),
                    "speed": round(each.prefill_tokens_per_second),
                    "requests": lately.requests,
                    "hit_predicted": _short(lately.hit_rate_predicted),
                    "hit_measured": _short(lately.hit_rate_measured),
                    "attainment": _short(lately.attainment),
                    "failed": lately.failed,
                }
            )
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def _ring_shares(self, pool: Pool, status: PoolStatus) -> tuple[Mapping[str, float], Mapping[str, float]]:
        suspended = frozenset(each.id for each in status.endpoints if each.suspended)
        known = self._shares.get(pool.id)
        if known is None or known[0] is not pool or known[1] != suspended:
            members = [member for member in pool.members if member.id not in suspended]
            # As the router does: where all are suspended, none is.
            shares = DualRing(members or pool.members, pool.routing.ring).shares()
            known = self._shares[pool.id] = (pool, suspended, shares)
        return known[2]

    def _happening(self, happening: Happening) -> Json:
        at = round(self._source.clock() - self._source.recorder.age_s(happening.at_s), 1)
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


def _wanted(status: PoolStatus, signals: PoolSignals | None) -> float | None:
    """Return how many instances the whole pool wants, judged by this router's share of it."""
    return None if signals is None else signals.desired_replicas * (1 + status.peers)


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


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.{_DIGITS}g}")
