"""The dashboard's verdict: whether a pool meets its SLO, and the pool's problems, as text.

The functions do no I/O. They use this router's view of the pool, its status and its recent history at one moment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from statistics import median
from typing import Final

from dualmap.engines.source import SourceState
from dualmap.objects.times import time_text
from dualmap.pools.pool import MemberState, Pool
from dualmap.requests import EndpointStatus, PoolSnapshot
from dualmap_extproc.telemetry.dashboard.history import HistoryView, Recent

_FEW_FIRST_TOKENS: Final = 20
"""With fewer first tokens in a minute, the attainment covers five minutes."""
_BELIEVED: Final = 0.7
"""Below this ratio of measured to predicted cache hits, engines have evicted blocks that are in the index."""
_CHECKED_TOKENS: Final = 10_000
"""The verdict reports evicted blocks only if at least this number of predicted tokens is measured."""
_SLOW: Final = 0.5
"""A member is slow if its prefill speed is below this share of the median speed."""
_TOLERANCE: Final = 1.1
"""The allowed ratio of desired replicas to members, as in ``dualmap.scaling.scaling``."""
_STALE_S: Final = 75.0
"""A watch is stale above this age. A reachable API server answers within 45 s for every resource.

The alert DualMapMembershipStale has the same threshold.
"""
_LOST_S: Final = 3.0
"""The duration of a Redis failover. The router retries every second."""
_NAMED: Final = 3
"""The most members that a problem's text names. The text counts the other members."""
_REASON_MAX: Final = 120
"""The longest reason of an engine, because each member may have one."""


class Level(StrEnum):
    """Severity, best first: no traffic, SLO met, warning, users affected."""

    IDLE = "idle"
    OK = "ok"
    WARN = "warn"
    BAD = "bad"


_RANK: Final = {level: rank for rank, level in enumerate(Level)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A finding for the on-call engineer; the level OK marks information without a problem."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Whether Redis, the Kubernetes API and the pool's KV store answer.

    ``store_lost_s`` is the time since Redis became unreachable, or None while it is reachable or not used.
    ``watch_ages_s`` is the time since the Kubernetes API's last answer, by resource. ``watch_ages_s`` is empty for
    pools from files. ``kv_store_lost`` is true while the router leaves the pool's KV store alone after failures.
    """

    store_lost_s: float | None = None
    watch_ages_s: Mapping[str, float] = field(default_factory=dict)
    kv_store_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The headline, and the problems in descending severity."""

    level: Level
    headline: str
    problems: tuple[Problem, ...]


def judge(
    pool: Pool, status: PoolSnapshot, past: HistoryView, reach: Reach, *, wanted: float | None, unknown: str = ""
) -> Verdict:
    """Return the verdict on a pool.

    ``wanted`` is the desired replicas over all routers, or None if they are unknown; ``unknown`` then gives the reason.
    """
    level, headline = _objective(pool, status, past)
    problems = [
        *_refusals(pool, past),
        *_unreachable(reach),
        *_capacity(pool, status, wanted),
        *_instances(pool, status, past),
        *_members(status),
        *_engines(status),
    ]
    if unknown and not _redis_lost_s(reach):  # An unreachable store is already reported.
        problems.append(Problem(level=Level.WARN, text=f"The total demand of all routers is unknown: {unknown}."))
    problems.sort(key=lambda problem: -_RANK[problem.level])
    worst = max((problem.level for problem in problems), key=_RANK.__getitem__, default=Level.IDLE)
    if worst is Level.BAD and level is not Level.BAD:
        headline = f"{pool.id} rejects requests. {headline}"
    # Problems of level OK do not change the level of an idle pool.
    overall = level if worst is Level.OK else max(level, worst, key=_RANK.__getitem__)
    return Verdict(level=overall, headline=headline, problems=tuple(problems))


def telling(past: HistoryView) -> Recent:
    """Return the shortest recent period with enough first tokens for attainment."""
    return past.minute if past.minute.first_tokens >= _FEW_FIRST_TOKENS else past.window


def _objective(pool: Pool, status: PoolSnapshot, past: HistoryView) -> tuple[Level, str]:
    if not any(_serves(endpoint) for endpoint in status.endpoints):
        has = (
            f" {len(status.endpoints)} instances, but no instance accepts requests"
            if status.endpoints
            else " no instances"
        )
        queued = f"; {_count(status.held, 'request')} queued" if status.held else ""
        return Level.BAD, f"{pool.id} has{has}{queued}."
    recent = telling(past)
    attainment, slo = recent.attainment, pool.slo
    if attainment is not None:
        keeps = attainment >= slo.attainment
        if keeps and not _busy(status) and not past.minute.requests + past.minute.refused:
            return (
                Level.IDLE,
                f"{pool.id} is idle and received no request in the last minute. "
                "Before the last minute, the pool met its SLO.",
            )
        return (
            Level.OK if keeps else Level.BAD,
            f"{pool.id} {'meets' if keeps else 'misses'} its SLO: {_percent(attainment)} of first tokens arrived "
            f"within {slo.ttft_s:g} s in the last {_span(recent.seconds)} (goal {_percent(slo.attainment)}).",
        )
    if _busy(status) or recent.requests:
        return Level.IDLE, f"{pool.id} serves requests, but no streamed response started in the last 5 minutes."
    return Level.IDLE, f"{pool.id} is idle and received no request in the last 5 minutes."


def _refusals(pool: Pool, past: HistoryView) -> Iterator[Problem]:
    if not past.refusals:
        return
    codes = ", ".join(f"{number:,} {code}" for code, number in sorted(past.refusals.items(), key=lambda each: -each[1]))
    minute = past.minute
    felt = minute.refused > (1.0 - pool.slo.attainment) * (minute.requests + minute.refused)
    total = sum(past.refusals.values())
    yield Problem(
        level=Level.BAD if felt else Level.WARN,
        text=f"{_count(total, 'request')} rejected in the last 5 minutes ({codes}), "
        f"{minute.refused:,} in the last minute.",
    )


def _unreachable(reach: Reach) -> Iterator[Problem]:
    stale = {resource: age_s for resource, age_s in reach.watch_ages_s.items() if age_s > _STALE_S}
    if stale:
        yield Problem(
            level=Level.WARN,
            text=f"The Kubernetes API has sent no data about {' and '.join(sorted(stale))} for "
            f"{_lapse(max(stale.values()))}: this router uses the last received state.",
        )
    if lost_s := _redis_lost_s(reach):
        yield Problem(
            level=Level.WARN,
            text=f"Redis has been unreachable for {_lapse(lost_s)}: this router uses only its own state.",
        )
    if reach.kv_store_lost:
        yield Problem(
            level=Level.WARN,
            text="The KV store fails: this router counts only the KV cache of instances. /pools has the reason.",
        )


def _redis_lost_s(reach: Reach) -> float:
    """Return the time since Redis became unreachable, or 0 if the time is too short to report."""
    lost_s = reach.store_lost_s or 0.0
    return lost_s if lost_s > _LOST_S else 0.0


def _capacity(pool: Pool, status: PoolSnapshot, wanted: float | None) -> Iterator[Problem]:
    serving = sum(endpoint.state != MemberState.DRAINING for endpoint in status.endpoints)
    if wanted is not None and serving and wanted > serving * _TOLERANCE:
        yield Problem(
            level=Level.WARN,
            text=f"The pool needs {ceil(wanted):,} instances to meet its SLO, but has only {serving:,}.",
        )
    late = {each.id: wait for each in status.endpoints if (wait := backlog_s(each)) > pool.slo.ttft_s}
    if late:
        longest = max(late.values())
        yield Problem(
            level=Level.WARN,
            text=f"{_names(late)} {_have(late)} more pending prefill than the SLO of {pool.slo.ttft_s:g} s "
            f"allows (longest: {longest:.1f} s).",
        )


def _instances(pool: Pool, status: PoolSnapshot, past: HistoryView) -> Iterator[Problem]:
    suspended = [each.id for each in status.endpoints if each.suspended]
    if suspended:
        yield Problem(
            level=Level.WARN,
            text=f"{_names(suspended)} {_be(suspended)} suspended after several failed requests in a row.",
        )
    present = {each.id for each in status.endpoints}
    failed = {name: each.failed for name, each in past.endpoints.items() if each.failed and name in present}
    if failed:
        yield Problem(
            level=Level.WARN,
            text=f"{_names(failed)} failed {_count(sum(failed.values()), 'request')} in the last 5 minutes.",
        )
    speeds = {each.id: each.prefill_tokens_per_second for each in status.endpoints if _serves(each)}
    typical = median(speeds.values()) if speeds else 0.0
    slow = {name: speed for name, speed in speeds.items() if speed < typical * _SLOW}
    if slow:
        yield Problem(
            level=Level.WARN,
            text=f"{_names(slow)} {'prefills' if len(slow) == 1 else 'prefill'} at less than half of the median "
            f"{typical:,.0f} tokens/s (slowest: {min(slow.values()):,.0f}).",
        )
    checked, measured = past.total.checked_cached_tokens, past.total.measured_cached_tokens
    if checked >= _CHECKED_TOKENS and measured < checked * _BELIEVED:
        yield Problem(
            level=Level.WARN,
            text=f"Engines had only {_percent(measured / checked)} of the predicted tokens in their caches: "
            "spec.engine.cacheTokens is too high, or an engine lost its cache.",
        )


def _members(status: PoolSnapshot) -> Iterator[Problem]:
    for each in status.endpoints:
        if each.leave_at_s is not None:
            yield Problem(level=Level.OK, text=f"{each.id} is draining and leaves at {time_text(each.leave_at_s)}.")
    for state, doing in ((MemberState.JOINING, "joining"), (MemberState.DRAINING, "draining")):
        names = [each.id for each in status.endpoints if each.state == state and each.leave_at_s is None]
        if names:
            yield Problem(level=Level.OK, text=f"{_names(names)} {_be(names)} {doing}.")


def _engines(status: PoolSnapshot) -> Iterator[Problem]:
    """Yield what is wrong with engines, and what the router does not know of them."""
    asleep = [each.id for each in status.endpoints if each.engine.asleep]
    if asleep:
        yield Problem(level=Level.OK, text=f"{_names(asleep)} {_be(asleep)} asleep.")
    unfit = {each.id: each.engine.mismatch for each in status.endpoints if each.engine.mismatch}
    if unfit:
        yield Problem(
            level=Level.WARN,
            text=f"{_names(unfit)} {'does' if len(unfit) == 1 else 'do'} not fit the pool ({_first(unfit)}).",
        )
    unread = {each.id: each.engine.reason for each in status.endpoints if each.engine.reason}
    if unread:
        yield Problem(
            level=Level.OK,
            text=f"The router cannot read everything about the engines of {_names(unread)} ({_first(unread)}).",
        )
    lost = {
        each.id: each.events.reason
        for each in status.endpoints
        if each.events.reason and each.events.state is not SourceState.SYNCING
    }
    if lost:
        yield Problem(level=Level.OK, text=f"The KV events of {_names(lost)} are incomplete ({_first(lost)}).")


def shortened(reason: str) -> str:
    """Return a reason of an engine with a limited length."""
    return reason if len(reason) <= _REASON_MAX else f"{reason[: _REASON_MAX - 1]}\N{HORIZONTAL ELLIPSIS}"


def _first(reasons: Mapping[str, str]) -> str:
    name = min(reasons)
    return f"{name}: {shortened(reasons[name])}"


def backlog_s(endpoint: EndpointStatus) -> float:
    """Return the seconds that a member needs to prefill its pending and queued requests."""
    tokens = endpoint.pending_prefill_tokens + endpoint.held_prefill_tokens
    return tokens / endpoint.prefill_tokens_per_second if endpoint.prefill_tokens_per_second > 0 else 0.0


def _serves(endpoint: EndpointStatus) -> bool:
    """Return whether new requests may go to a member, possibly a suspended one if all are suspended."""
    return endpoint.state != MemberState.DRAINING and endpoint.weight > 0


def _busy(status: PoolSnapshot) -> bool:
    return status.held > 0 or any(endpoint.in_flight for endpoint in status.endpoints)


def _percent(share: float) -> str:
    """Return a share in percent, rounded down, so that a missed goal does not look met."""
    return f"{int(share * 1000 + 1e-6) / 10:g}%"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _span(seconds: int) -> str:
    return "minute" if seconds == 60 else f"{seconds // 60} minutes"


def _lapse(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * 60 else f"{seconds // 60:.0f} minutes"


def _names(names: Sequence[str] | Mapping[str, object]) -> str:
    listed = sorted(names)
    if len(listed) > _NAMED:
        return f"{', '.join(listed[: _NAMED - 1])} and {len(listed) - _NAMED + 1} other instances"
    return " and ".join(([", ".join(listed[:-1])] if len(listed) > 1 else []) + listed[-1:])


def _have(names: Mapping[str, object]) -> str:
    return "has" if len(names) == 1 else "have"


def _be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
