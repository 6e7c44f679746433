"""How many instances a pool needs to keep its objective, by what its traffic asks of them; sans-IO, as the router is.

One router sees its share of the traffic, so what it says here is its share of the answer: the shares of all routers
add up to the pool's. docs/autoscaling.md has the rule, its reasons and what was measured; ``Scaling`` is the rule,
``LoadWindow`` what it remembers. Every ``now`` is in monotonic seconds, as the router's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from dualmap.fleet.estimate import PrefillModel
from dualmap.pools.pool import MemberState, Pool
from dualmap.requests import EndpointStatus, PoolSnapshot

WINDOW_S = 60.0
"""Traffic and attainment are looked at over so many seconds; the backlog shall be worked off in as many."""
_BUCKET_S = 5.0
_HELD_EVERY_S = 1.0
# A surge is noticed in the newest part of the window, but only what chance does not make of as few requests: the sum of
# requests of random number has the root of the sum of their squares for its standard deviation. Of a share of the
# requests less is certain, so that routers together never see a surge that one of all of them would not.
_RECENT_S = 15.0
_DEVIATIONS = 3.0
# Share of the prefill speed that may be asked for. On the Conversation trace 99.5 % of the requests meet the SLO when
# 0.47 is asked for, 96 % at 0.53, 64 % at 0.63: engines decode, too, and requests come in batches.
_UTILISATION = 0.5
# Fewer first tokens than this say nothing about attainment.
_FEWEST_FIRST_TOKENS = 20
# How fast instances are added that only attainment asks for: if no request met the SLO, half the fleet in a window.
_GAIN = 0.5
# They are given up again over hours: only missing the SLO once more would show that they were needed.
_RELAX_S = 7200.0
# A fleet this close to the wish is what was wished for: an HPA tolerates a tenth.
_TOLERANCE = 1.1
# Any traffic asks for this much, which is one instance when the sum over routers is rounded up.
_LEAST = 0.01
# Seconds that prefills take an instance of one token per second, by which long contexts count for what they cost.
_WORK = PrefillModel(1.0).speed


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSignals:
    """One router's share of what autoscalers look at; attainment is a share of requests (0 to 1), None without any.

    All others add up over routers: tokens that wait for a first token, held ones too, for each instance; tokens per
    second that arrive and are not cached; and instances needed, to be rounded up when all are added.
    """

    pending_prefill_tokens_per_endpoint: float
    arriving_uncached_tokens_per_second: float
    slo_attainment: float | None
    desired_replicas: float


def waiting_tokens(status: PoolSnapshot) -> int:
    """Return the tokens that wait for their first token, held ones included; those of members that leave are theirs."""
    waiting = sum(each.pending_prefill_tokens + each.held_prefill_tokens for each in _serving(status))
    return waiting + status.unplaced_prefill_tokens


def _serving(status: PoolSnapshot) -> list[EndpointStatus]:
    return [each for each in status.endpoints if each.state != MemberState.DRAINING]


@dataclass(slots=True)
class _Bucket:
    began_s: float
    requests: int = 0
    uncached_tokens: int = 0
    work: float = 0.0
    work_squared: float = 0.0
    refused: int = 0
    held: int = 0
    first_tokens: int = 0
    slo_met: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What arrived lately: uncached tokens per second, and their work in tokens of a short prompt.

    Refused and held requests count as much as the others did on average. ``dearness`` is the work of one uncached
    token; ``traffic`` says whether anything arrived at all, be it that it is held or that its client gave up.
    """

    traffic: bool
    uncached_tokens_per_second: float
    work_per_second: float
    dearness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """How many first tokens came within WINDOW_S, and how many of them in time."""

    count: int
    slo_met: int

    def __add__(self, other: "FirstTokens") -> "FirstTokens":
        return FirstTokens(count=self.count + other.count, slo_met=self.slo_met + other.slo_met)

    @property
    def attainment(self) -> float | None:
        """The share that came in time; None without any."""
        return self.slo_met / self.count if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What another router of the pool last said: its part of the wish, and the first tokens that came through it."""

    desired_replicas: float
    first_tokens: FirstTokens


class LoadWindow:
    """What arrived within the last WINDOW_S and how it fared, in buckets."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._began_s: float | None = None
        # Tokens and work of the average request, for those refused or held; kept when nothing else arrives any more.
        self._typical = (0.0, 0.0)
        # How many requests were held at moments of the last minute.
        self._held: deque[tuple[float, int]] = deque()

    def add(self, now: float, *, uncached_tokens: int, cached_tokens: int) -> None:
        """Count a request that was sent to an instance."""
        bucket = self._bucket_at(now)
        bucket.requests += 1
        bucket.uncached_tokens += uncached_tokens
        work = _WORK.compute_s(uncached_tokens, cached_tokens)
        bucket.work += work
        bucket.work_squared += work * work

    def refuse(self, now: float) -> None:
        """Count a request that no instance had room for."""
        self._bucket_at(now).refused += 1

    def hold(self, now: float) -> None:
        """Count a request that is held: that is traffic, whatever becomes of it."""
        self._bucket_at(now).held += 1

    def first_token(self, now: float, *, within_slo: bool) -> None:
        """Count a first token."""
        bucket = self._bucket_at(now)
        bucket.first_tokens += 1
        bucket.slo_met += within_slo

    def arrivals(self, now: float, *, held: int) -> Arrivals:
        """Return what arrived: by the whole window, or more where its newest part says that traffic has surged.

        ``held`` is how many requests are held now. What arrives is what is sent to instances and by how much more is
        held than before: overloaded instances are sent only what they can do.
        """
        buckets = self._last(now, WINDOW_S)
        requests = sum(each.requests for each in buckets)
        if requests:
            self._typical = (
                sum(each.uncached_tokens for each in buckets) / requests,
                sum(each.work for each in buckets) / requests,
            )
        whole, recent = self._rates(now, WINDOW_S, held), self._rates(now, _RECENT_S, held)
        certain = self._certain(now)
        tokens, work = (max(each, newest * certain) for each, newest in zip(whole, recent, strict=True))
        # However often that is asked for.
        if not self._held or now - self._held[-1][0] >= _HELD_EVERY_S:
            self._held.append((now, held))
        while self._held[0][0] < now - WINDOW_S - _BUCKET_S:
            self._held.popleft()
        return Arrivals(
            traffic=any(each.requests or each.refused or each.held for each in buckets),
            uncached_tokens_per_second=tokens,
            work_per_second=work,
            dearness=work / tokens if tokens else 1.0,
        )

    def first_tokens(self, now: float) -> FirstTokens:
        """Return the first tokens that came."""
        buckets = self._last(now, WINDOW_S)
        return FirstTokens(
            count=sum(each.first_tokens for each in buckets), slo_met=sum(each.slo_met for each in buckets)
        )

    def _rates(self, now: float, over_s: float, held: int) -> tuple[float, float]:
        """Return uncached tokens and work per second."""
        buckets = self._last(now, over_s)
        if not buckets or self._began_s is None:
            return 0.0, 0.0
        # A router that has just begun has not seen a whole window; a few seconds of it are not taken for a rate.
        seconds = max(min(now - self._first_s(now, over_s), now - self._began_s), _RECENT_S - _BUCKET_S)
        others = sum(each.refused for each in buckets) + self._more_held(now, held, seconds)
        tokens = sum(each.uncached_tokens for each in buckets) + others * self._typical[0]
        work = sum(each.work for each in buckets) + others * self._typical[1]
        return max(0.0, tokens) / seconds, max(0.0, work) / seconds

    def _more_held(self, now: float, held: int, seconds: float) -> float:
        """Return by how many requests more are held than so many seconds ago; before anything came, none were."""
        at_s, was = now if self._began_s is None else self._began_s, 0
        for asked_s, held_then in self._held:
            if asked_s <= now - seconds:
                at_s, was = asked_s, held_then
        return (held - was) * seconds / max(now - at_s, seconds)

    def _certain(self, now: float) -> float:
        """Return which share of the newest part's work chance does not account for."""
        buckets, (_, typical) = self._last(now, _RECENT_S), self._typical
        work = sum(each.work + each.refused * typical for each in buckets)
        squared = sum(each.work_squared + each.refused * typical * typical for each in buckets)
        return max(0.0, 1.0 - _DEVIATIONS * sqrt(squared) / work) if work else 0.0

    def _bucket_at(self, now: float) -> _Bucket:
        began_s = now - now % _BUCKET_S
        if not self._buckets or self._buckets[-1].began_s < began_s:
            if self._began_s is None:
                self._began_s = now
            self._buckets.append(_Bucket(began_s))
            while self._buckets[0].began_s < self._first_s(now, WINDOW_S):
                self._buckets.popleft()
        return self._buckets[-1]

    def _last(self, now: float, over_s: float) -> list[_Bucket]:
        first_s = self._first_s(now, over_s)
        return [each for each in self._buckets if each.began_s >= first_s]

    @staticmethod
    def _first_s(now: float, over_s: float) -> float:
        """Return when the oldest bucket of a window began."""
        return now - now % _BUCKET_S - over_s + _BUCKET_S


class Scaling:
    """The wish for instances of one pool, as one router has it. To be told of every request, and asked now and then."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.window = LoadWindow()
        # Instances that the arrivals do not ask for, but attainment does.
        self._extra = 0.0
        self._members = 0
        self._members_since_s = 0.0
        self._asked_s: float | None = None

    def adopt(self, pool: Pool) -> None:
        """Take a new version of the pool: its objective and its guess of the speed."""
        self._pool = pool

    def signals(self, now: float, status: PoolSnapshot, *, elsewhere: Sequence[Elsewhere] | None = ()) -> PoolSignals:
        """Return what autoscalers shall know, of a status of this moment.

        ``elsewhere`` is what the other routers said, each of them: what attainment asks for it asks for by the pool's,
        since a share of it may be too little to tell anything, or be late by chance. None where there are some of whom
        it is not known: then attainment asks for nothing more.
        """
        serving = _serving(status)
        backlog_tokens = waiting_tokens(status)
        arrivals = self.window.arrivals(now, held=status.held)
        own = self.window.first_tokens(now)
        needed = self._needed(arrivals, backlog_tokens, serving)
        self._note_members(now, len(serving))
        self._correct(now, own, needed, elsewhere)
        traffic = arrivals.traffic or status.held or backlog_tokens or any(each.in_flight for each in status.endpoints)
        if elsewhere and not traffic:
            # The wish leaves it out, so that the others come to ask for it, to whom the traffic has gone.
            self._extra = 0.0
        return PoolSignals(
            pending_prefill_tokens_per_endpoint=backlog_tokens / max(1, len(serving)),
            arriving_uncached_tokens_per_second=arrivals.uncached_tokens_per_second,
            slo_attainment=own.attainment,
            desired_replicas=max(needed + self._extra, _LEAST) if traffic else 0.0,
        )

    def _needed(self, arrivals: Arrivals, backlog_tokens: int, serving: list[EndpointStatus]) -> float:
        """Return how many instances the arrivals keep busy, and the backlog besides."""
        speed = self._pool.engine.prefill_tokens_per_second
        if serving:
            # Of the instances alone: what other routers' prefills cost is in these routers' own wishes.
            speed = sum(each.solo_tokens_per_second for each in serving) / len(serving)
        # By Little's law no more than this waits while everybody is served within the SLO.
        in_time = arrivals.work_per_second * self._pool.slo.ttft_s
        late = max(0.0, backlog_tokens * arrivals.dearness - in_time)
        # Instances that work off what is late may be busy all the time: it asks for no headroom of its own.
        return (arrivals.work_per_second / _UTILISATION + late / WINDOW_S) / speed

    def _note_members(self, now: float, members: int) -> None:
        if members != self._members:
            self._members, self._members_since_s = members, now

    def _correct(self, now: float, own: FirstTokens, needed: float, elsewhere: Sequence[Elsewhere] | None) -> None:
        """Add instances while the SLO is missed by a fleet that is as large as was wished, or give some up again.

        What an unfinished scale-up misses calls for no more instances, and what the fleet missed before it last changed
        says nothing about it. All routers see the same attainment, fleet and wish, and each adds its part of what one
        alone would.
        """
        passed_s = 0.0 if self._asked_s is None else min(now - self._asked_s, WINDOW_S)
        self._asked_s = now
        others = elsewhere or ()
        everywhere = sum((each.first_tokens for each in others), own)
        known = elsewhere is not None and everywhere.count >= _FEWEST_FIRST_TOKENS
        goal, attainment = self._pool.slo.attainment, everywhere.attainment if known else None
        if attainment is None or attainment >= (1.0 + goal) / 2:
            self._extra *= exp(-passed_s / _RELAX_S)
        elif attainment < goal:
            settled = now - self._members_since_s >= WINDOW_S
            wish = needed + self._extra + sum(each.desired_replicas for each in others)
            if settled and wish <= self._members * _TOLERANCE:
                # Not an equal share: Envoys keep their connections, so that some routers may have no traffic at all.
                share = self._members * (own.count / everywhere.count)
                growth = _GAIN * (1.0 - attainment / goal) * share * passed_s / WINDOW_S
                self._extra = max(self._extra, _part(self._members, own, others) - needed) + growth


def _part(fleet: int, own: FirstTokens, others: Sequence[Elsewhere]) -> float:
    """Return which part of the fleet a router may ask for, so that all of them ask for the fleet and no more.

    They divide it by their first tokens, but for those who ask for more than that already: they go on to. However
    often it is asked, and whoever has asked for its part meanwhile, the parts are the same.
    """
    left, count = float(fleet), own.count + sum(each.first_tokens.count for each in others)
    for each in sorted(others, key=_eagerness, reverse=True):
        if each.desired_replicas * count <= left * each.first_tokens.count:
            break
        left -= each.desired_replicas
        count -= each.first_tokens.count
    return left * (own.count / count) if own.count else 0.0


def _eagerness(other: Elsewhere) -> float:
    """Return how much a router asks for by first token."""
    return other.desired_replicas / other.first_tokens.count if other.first_tokens.count else inf
