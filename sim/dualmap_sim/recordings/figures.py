"""Computes the figures of a recording in one pass: rates, lengths, reuse, latencies and outcomes."""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.recordings.values import Missing, PoolChanged, PoolRemoved, RecordedOutcome, RecordedRequest
from dualmap_sim.recordings.reader import Event
from dualmap_sim.recordings.reuse import HotPrefix, PrefixCounts

_HOT_PREFIXES: Final = 10
_RATE_BINS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFigures:
    """The requests that a member served. ``hit_rate`` is None if its engine reported no cached tokens."""

    pool: str
    member: str
    requests: int
    prompt_tokens: int
    hit_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a recording. Sequences of numbers are in increasing order, and ``arrivals_s`` begins at 0.

    ``prompt_tokens`` are the engines' counts, or the routers' estimates where the engine reported none.
    ``reuse_at_best`` is the share of prompt tokens that one cache without a limit would contain. ``hit_rate`` is
    cached over prompt tokens where an engine reported both. ``slo_attainment`` covers streamed and refused requests.
    Each is None if the recording does not have it. ``sessions`` counts distinct named sessions. ``unrouted`` requests
    found no pool, and ``dropped`` requests could not be written.
    """

    requests: int
    start_s: float | None
    arrivals_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    ttft_s: Sequence[float]
    duration_s: float
    sessions: int
    requests_with_session: int
    reuse_at_best: float | None
    hit_rate: float | None
    slo_attainment: float | None
    slo_ttft_s: Mapping[str, float]
    outcomes: Mapping[str, int]
    pools: Mapping[str, int]
    models: Mapping[str, int]
    members: Sequence[MemberFigures]
    hot_prefixes: Sequence[HotPrefix]
    unrouted: int
    dropped: int

    @property
    def qps(self) -> float | None:
        """The mean number of requests per second; None if all arrived at one time."""
        return self.requests / self.duration_s if self.duration_s else None

    def rates(self) -> tuple[float, Sequence[int]]:
        """Return the length of an interval in seconds, and the requests that arrived in each interval."""
        if not self.duration_s:
            return 0.0, [self.requests] if self.requests else []
        width_s = self.duration_s / _RATE_BINS
        counts = [0] * _RATE_BINS
        for at_s in self.arrivals_s:
            counts[min(int(at_s / width_s), _RATE_BINS - 1)] += 1
        return width_s, counts


def compute_figures(events: Iterable[Event]) -> Figures:
    """Return the figures of a recording's lines, which are in order of time."""
    tally = _Tally()
    for event in events:
        tally.add(event)
    return tally.figures()


class _Attainment:
    """Counts the requests within the SLO of their pool at their arrival.

    Requests before the first line about their pool count with the SLO of that line.
    """

    def __init__(self) -> None:
        self.slos_s: dict[str, float] = {}
        self._early: dict[str, list[float | None]] = {}
        self._counted = 0
        self._within = 0

    @property
    def share(self) -> float | None:
        return self._within / self._counted if self._counted else None

    def set_slo(self, pool: str, slo_s: float) -> None:
        self.slos_s[pool] = slo_s
        for ttft_s in self._early.pop(pool, ()):
            self._count(ttft_s, slo_s)

    def add(self, request: RecordedRequest) -> None:
        refused = request.outcome is RecordedOutcome.REFUSED
        if not request.streamed and not refused:
            return
        ttft_s = None if refused else request.ttft_s
        slo_s = self.slos_s.get(request.pool)
        if slo_s is None:
            self._early.setdefault(request.pool, []).append(ttft_s)
        else:
            self._count(ttft_s, slo_s)

    def _count(self, ttft_s: float | None, slo_s: float) -> None:
        self._counted += 1
        self._within += ttft_s is not None and ttft_s <= slo_s


class _Hits:
    """Sums measured cached tokens and prompt tokens."""

    def __init__(self) -> None:
        self.requests = 0
        self.all_prompt_tokens = 0
        self._cached_tokens = 0
        self._prompt_tokens = 0

    @property
    def rate(self) -> float | None:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def add(self, request: RecordedRequest) -> None:
        self.requests += 1
        self.all_prompt_tokens += request.known_prompt_tokens
        if request.cached_tokens is not None and request.engine_prompt_tokens is not None:
            self._cached_tokens += request.cached_tokens
            self._prompt_tokens += request.engine_prompt_tokens


class _Tally:
    def __init__(self) -> None:
        self._arrivals_s = array("d")
        self._prompt_tokens = array("q")
        self._output_tokens = array("q")
        self._ttft_s = array("d")
        self._sessions: set[int] = set()
        self._with_session = 0
        self._prefixes = PrefixCounts()
        self._attainment = _Attainment()
        self._hits = _Hits()
        self._members: dict[tuple[str, str], _Hits] = {}
        self._outcomes = Counter({str(each): 0 for each in RecordedOutcome})
        self._pools: Counter[str] = Counter()
        self._models: Counter[str] = Counter()
        self._unrouted = 0
        self._dropped = 0

    def add(self, event: Event) -> None:
        match event:
            case RecordedRequest():
                self._add_request(event)
            case PoolChanged():
                self._pools[event.pool.id] += 0
                self._attainment.set_slo(event.pool.id, event.pool.slo.ttft_s)
            case Missing():
                self._unrouted += event.unrouted
                self._dropped += event.dropped
            case PoolRemoved():
                pass

    def _add_request(self, request: RecordedRequest) -> None:
        self._arrivals_s.append(request.arrived_s)
        self._prompt_tokens.append(request.known_prompt_tokens)
        if request.output_tokens is not None:
            self._output_tokens.append(request.output_tokens)
        if request.streamed and request.ttft_s is not None:
            self._ttft_s.append(request.ttft_s)
        if request.session is not None:
            self._sessions.add(request.session)
            self._with_session += 1
        self._prefixes.add(request)
        self._attainment.add(request)
        self._hits.add(request)
        self._outcomes[str(request.outcome)] += 1
        self._pools[request.pool] += 1
        self._models[request.model] += 1
        member = request.served or (request.receipt.chosen if request.receipt is not None else "")
        if member and request.outcome is not RecordedOutcome.REFUSED:
            self._members.setdefault((request.pool, member), _Hits()).add(request)

    def figures(self) -> Figures:
        start_s = self._arrivals_s[0] if self._arrivals_s else None
        arrivals_s = [at_s - (start_s or 0.0) for at_s in self._arrivals_s]
        return Figures(
            requests=len(self._arrivals_s),
            start_s=start_s,
            arrivals_s=arrivals_s,
            prompt_tokens=sorted(self._prompt_tokens),
            output_tokens=sorted(self._output_tokens),
            ttft_s=sorted(self._ttft_s),
            duration_s=arrivals_s[-1] if arrivals_s else 0.0,
            sessions=len(self._sessions),
            requests_with_session=self._with_session,
            reuse_at_best=self._prefixes.reuse_at_best,
            hit_rate=self._hits.rate,
            slo_attainment=self._attainment.share,
            slo_ttft_s=self._attainment.slos_s,
            outcomes=self._outcomes,
            pools=self._pools,
            models=self._models,
            members=[
                MemberFigures(
                    pool=pool,
                    member=member,
                    requests=hits.requests,
                    prompt_tokens=hits.all_prompt_tokens,
                    hit_rate=hits.rate,
                )
                for (pool, member), hits in sorted(self._members.items())
            ],
            hot_prefixes=self._prefixes.hottest(_HOT_PREFIXES),
            unrouted=self._unrouted,
            dropped=self._dropped,
        )
