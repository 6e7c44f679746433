"""The recent history of one pool in time buckets, for the dashboard's figures, charts and list of decisions.

Every ``now`` is in monotonic seconds. The number of buckets and decisions is bounded. ``histories`` counts every
request with a few additions. ``PoolHistory.view`` computes sums, but only while a page is open.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Final

from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused

STEP_S: Final = 10
STEPS: Final = 60
"""The number of steps in a chart: ten minutes."""
_MINUTE_S: Final = 60
WINDOW_S: Final = 300
"""The period of the figures of members, hit rates and rules: the last five minutes."""
_MINUTES: Final = WINDOW_S // _MINUTE_S
DECISIONS: Final = 24
"""The number of decisions that the history of a pool keeps."""
TTFT_BOUNDS_S: Final = tuple(10 ** (tenth / 10) for tenth in range(-20, 29))
"""Ten bounds per factor of ten, from 10 ms to ten minutes, which is the longest TTFT objective that pools may set."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """Counts of STEP_S seconds; ``point`` caches the step's point in the charts after the end of the step."""

    number: int
    requests: int = 0
    refused: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    ttfts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))
    point: "Step | None" = None


@dataclass(slots=True)
class EndpointPast:
    """Counts of one member's requests within a period; sessions count at the member that they move to."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    fetch_tokens: int = 0
    moved_sessions: int = 0
    checked_cached_tokens: int = 0
    measured_cached_tokens: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    failed: int = 0

    def add(self, other: "EndpointPast") -> None:
        """Add the counts of another period or member."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.predicted_cached_tokens += other.predicted_cached_tokens
        self.fetch_tokens += other.fetch_tokens
        self.moved_sessions += other.moved_sessions
        self.checked_cached_tokens += other.checked_cached_tokens
        self.measured_cached_tokens += other.measured_cached_tokens
        self.first_tokens += other.first_tokens
        self.slo_met += other.slo_met
        self.failed += other.failed

    @property
    def hit_rate_predicted(self) -> float | None:
        """The share of the prompt tokens that the router predicted to be cached."""
        return self.predicted_cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def fetched(self) -> float | None:
        """The share of the prompt tokens that the router predicted to be fetched from a KV store or another member."""
        return self.fetch_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def hit_rate_measured(self) -> float | None:
        """The predicted share of cached tokens, corrected by the engines' reports; None without a reported request.

        A share of all prompt tokens would count requests in flight and engines without reports as misses.
        """
        predicted = self.hit_rate_predicted
        if predicted is None or not self.checked_cached_tokens:
            return None
        return min(1.0, predicted * self.measured_cached_tokens / self.checked_cached_tokens)

    @property
    def attainment(self) -> float | None:
        """The share of first tokens within the SLO."""
        return self.slo_met / self.first_tokens if self.first_tokens else None


@dataclass(slots=True)
class _Minute:
    """Counts of one minute: by member, by rule and by the rejections' code."""

    number: int
    endpoints: dict[str, EndpointPast] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)

    def endpoint(self, name: str) -> EndpointPast:
        past = self.endpoints.get(name)
        if past is None:
            past = self.endpoints[name] = EndpointPast()
        return past


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A decision or rejection; ``number`` is unique within the pool, ``at_s`` is its time in monotonic seconds."""

    number: int
    at_s: float
    what: Decision | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One point of the charts: requests routed and rejected, first tokens, first tokens within the SLO, and TTFTs."""

    requests: int
    refused: int
    first_tokens: int
    slo_met: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """Sums over the last ``seconds``; TTFTs are None without first tokens. ``ttfts`` counts TTFTs by TTFT_BOUNDS_S."""

    seconds: int
    requests: int
    refused: int
    first_tokens: int
    slo_met: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttfts: tuple[int, ...]

    @property
    def attainment(self) -> float | None:
        """The share of first tokens within the SLO."""
        return self.slo_met / self.first_tokens if self.first_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """A view of the history: sums of a minute and of WINDOW_S, steps (oldest first) and decisions (newest first).

    ``total`` is the sum over all members, including removed members.
    """

    minute: Recent
    window: Recent
    steps: tuple[Step, ...]
    endpoints: dict[str, EndpointPast]
    total: EndpointPast
    rules: dict[str, int]
    refusals: dict[str, int]
    happenings: tuple[Happening, ...]


class PoolHistory:
    """The recent history of one pool's requests."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=STEPS)
        self._minutes: deque[_Minute] = deque(maxlen=_MINUTES)
        # The current step and minute, and the end of the step. Every minute begins at the start of a step.
        self._step = _Step(number=-1)
        self._minute = _Minute(-1)
        self._until_s = -inf
        # The number, time and event of each item. Only a view creates Happening objects, because their creation is
        # expensive.
        self._happenings: deque[tuple[int, float, Decision | Refused]] = deque(maxlen=DECISIONS)
        self._happened = 0

    def routed(self, now: float, decision: Decision) -> None:
        """Count a request sent to a member, and keep its decision."""
        if now >= self._until_s:
            self._turn(now)
        receipt, minute = decision.receipt, self._minute
        self._step.requests += 1
        minute.rules[receipt.rule] = minute.rules.get(receipt.rule, 0) + 1
        past = minute.endpoint(receipt.chosen)
        past.requests += 1
        past.prompt_tokens += receipt.prompt_tokens
        past.predicted_cached_tokens += receipt.matched_tokens
        past.fetch_tokens += receipt.fetch_tokens or 0
        past.moved_sessions += bool(receipt.moved_from)
        self._happenings.append((self._happened, now, decision))
        self._happened += 1

    def refused(self, now: float, refused: Refused) -> None:
        """Count a request that the router rejected."""
        if now >= self._until_s:
            self._turn(now)
        self._step.refused += 1
        refusals = self._minute.refusals
        refusals[refused.code] = refusals.get(refused.code, 0) + 1
        self._happenings.append((self._happened, now, refused))
        self._happened += 1

    def first_token(self, now: float, first_token: FirstToken) -> None:
        """Count a first token."""
        if now >= self._until_s:
            self._turn(now)
        step, past = self._step, self._minute.endpoint(first_token.member)
        step.first_tokens += 1
        step.slo_met += first_token.within_slo
        step.ttfts[bisect_left(TTFT_BOUNDS_S, first_token.ttft_s)] += 1
        past.first_tokens += 1
        past.slo_met += first_token.within_slo

    def measured(self, now: float, completion: Completion) -> None:
        """Count the cached tokens that an engine reported."""
        if now >= self._until_s:
            self._turn(now)
        past = self._minute.endpoint(completion.member)
        past.checked_cached_tokens += completion.predicted_cached_tokens
        past.measured_cached_tokens += completion.measured_cached_tokens or 0

    def failed(self, now: float, completion: Completion) -> None:
        """Count a request that a member failed to serve."""
        if now >= self._until_s:
            self._turn(now)
        self._minute.endpoint(completion.member).failed += 1

    def quiet(self, now: float) -> bool:
        """Return whether all data of this pool is older than the charts."""
        return not self._steps or self._steps[-1].number <= now // STEP_S - STEPS

    def view(self, now: float) -> HistoryView:
        """Return the current view."""
        last = int(now // STEP_S)
        steps = {step.number: step for step in self._steps}
        line = [steps.get(number) or _Step(number=number) for number in range(last - STEPS + 1, last + 1)]
        first_minute = now // _MINUTE_S - _MINUTES + 1
        endpoints: dict[str, EndpointPast] = {}
        rules: dict[str, int] = {}
        refusals: dict[str, int] = {}
        for minute in self._minutes:
            if minute.number >= first_minute:
                for name, past in minute.endpoints.items():
                    endpoints.setdefault(name, EndpointPast()).add(past)
                _add(rules, minute.rules)
                _add(refusals, minute.refusals)
        total = EndpointPast()
        for past in endpoints.values():
            total.add(past)
        return HistoryView(
            minute=_recent(line, _MINUTE_S),
            window=_recent(line, WINDOW_S),
            steps=tuple(_point(step, over=step.number < last) for step in line),
            endpoints=endpoints,
            total=total,
            rules=rules,
            refusals=refusals,
            happenings=tuple(
                Happening(number=number, at_s=at_s, what=what) for number, at_s, what in reversed(self._happenings)
            ),
        )

    def _turn(self, now: float) -> None:
        """Begin the step and the minute that contain ``now``."""
        number = int(now // STEP_S)
        self._until_s = (number + 1) * STEP_S
        self._step = _Step(number=number)
        self._steps.append(self._step)
        minute = number * STEP_S // _MINUTE_S
        if minute != self._minute.number:
            self._minute = _Minute(minute)
            self._minutes.append(self._minute)


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return the value that ``share`` of the counted TTFTs do not exceed, or None without TTFTs.

    The value is interpolated between two bounds on a logarithmic scale. The error of the value is at most 26 %.
    """
    *below, total = accumulate(counts, initial=0)
    if not total:
        return None
    wanted = share * total
    index = bisect_left([*below[1:], total], wanted)
    inside = (wanted - below[index]) / counts[index]
    upper = TTFT_BOUNDS_S[min(index, len(TTFT_BOUNDS_S) - 1)]
    return float(upper * 10 ** ((inside - 1) / 10))


def _recent(line: Sequence[_Step], seconds: int) -> Recent:
    """Return sums of the last ``seconds`` of these steps, including the current step."""
    steps = line[-seconds // STEP_S :]
    ttfts = _sum_ttfts(steps)
    return Recent(
        seconds=seconds,
        requests=sum(step.requests for step in steps),
        refused=sum(step.refused for step in steps),
        first_tokens=sum(step.first_tokens for step in steps),
        slo_met=sum(step.slo_met for step in steps),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttfts=ttfts,
    )


def _point(step: _Step, *, over: bool) -> Step:
    """Return a step's point. If the step is ``over``, cache the point."""
    point = step.point or Step(
        requests=step.requests,
        refused=step.refused,
        first_tokens=step.first_tokens,
        slo_met=step.slo_met,
        ttft_p50_s=percentile(step.ttfts, 0.5) if step.first_tokens else None,
        ttft_p90_s=percentile(step.ttfts, 0.9) if step.first_tokens else None,
    )
    if over:
        step.point = point
    return point


def _sum_ttfts(steps: Iterable[_Step]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(step.ttfts for step in steps), strict=True)))


def _add(into: dict[str, int], counts: dict[str, int]) -> None:
    for name, number in counts.items():
        into[name] = into.get(name, 0) + number
