"""Computes the number of members that a pool needs to meet its objective, from its traffic, without I/O.

One router observes its share of the traffic, so it computes its share of the desired replicas. The sum over all routers
is the pool's desired replicas. The rule, its reasons and its measurements are described in docs/autoscaling.md.
``Scaling`` implements the rule, and ``LoadWindow`` stores the recent traffic. Every ``now`` is in monotonic seconds, as
in the router.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from dualmap.fleet.estimate import PrefillModel
from dualmap.pools.pool import MemberState, Pool
from dualmap.requests import EndpointStatus, PoolSnapshot

WINDOW_S = 60.0
"""The window for traffic and attainment in seconds. Members must also compute a late backlog within this time."""
_BUCKET_S = 5.0
_HELD_EVERY_S = 1.0
# The newest _RECENT_S of the window can show a surge, but only statistically significant work counts as a surge. The
# standard deviation of a sum over a random number of requests is the square root of the sum of their squares. One
# router's share is less significant than the total, so several routers never detect a surge that a single router would
# not detect.
_RECENT_S = 15.0
_DEVIATIONS = 3.0
# The share of the prefill speed that traffic may use. On the Conversation trace, 99.5 % of the requests meet the SLO at
# the share 0.47, 96 % at 0.53, and 64 % at 0.63. Decoding and bursts of requests cause the misses.
_UTILISATION = 0.5
# The part of a member's KV memory that prompts may use in a pool with a prefill pool. The rest is for outputs and for
# bursts. No measurement led to this value.
_KV_UTILISATION = 0.7
# The smallest number of first tokens for an estimate of attainment.
_FEWEST_FIRST_TOKENS = 20
# The rate at which low attainment adds members: if no request meets the SLO, half of the present members per window.
_GAIN = 0.5
# Added members are removed over hours, because only another SLO miss would show that they are necessary.
_RELAX_S = 7200.0
# A scale-up is complete if the desired replicas are within this factor of the members: an HPA tolerates a tenth.
_TOLERANCE = 1.1
# The lowest desired replicas with any traffic: rounding up the sum over routers gives one member.
_LEAST = 0.01
# The prefill time of a member with one token per second, so that long contexts count by their cost.
_WORK = PrefillModel(1.0).speed


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSignals:
    """One router's share of the signals for autoscalers.

    ``slo_attainment`` is a share of requests (0 to 1) or None. The other signals are summed over all routers: pending
    and queued prefill tokens per member, uncached arriving tokens per second, and desired replicas. The sum of the
    desired replicas must be rounded up.
    """

    pending_prefill_tokens_per_endpoint: float
    arriving_uncached_tokens_per_second: float
    slo_attainment: float | None
    desired_replicas: float


def waiting_tokens(status: PoolSnapshot) -> int:
    """Return the pending and queued prefill tokens, without the tokens of draining members."""
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
    rejected: int = 0
    held: int = 0
    first_tokens: int = 0
    slo_met: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The recent arrivals: uncached tokens per second, and their work per second in equivalent tokens of short prompts.

    Each rejected or queued request counts as an average request. ``work_per_token`` is the work of one uncached token.
    ``traffic`` is true if any request arrived, including queued and aborted requests.
    """

    traffic: bool
    uncached_tokens_per_second: float
    work_per_second: float
    work_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """The number of first tokens in the last WINDOW_S, and the number of first tokens within the SLO."""

    count: int
    slo_met: int

    def __add__(self, other: "FirstTokens") -> "FirstTokens":
        return FirstTokens(count=self.count + other.count, slo_met=self.slo_met + other.slo_met)

    @property
    def attainment(self) -> float | None:
        """The share of first tokens within the SLO; None without first tokens."""
        return self.slo_met / self.count if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRouter:
    """The last report of another router of the pool: its share of the desired replicas, and its first tokens."""

    desired_replicas: float
    first_tokens: FirstTokens


class LoadWindow:
    """The arrivals and first tokens of the last WINDOW_S, in buckets."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._began_s: float | None = None
        # Tokens and work of the average request, assumed for rejected and queued requests; unchanged while no request
        # arrives.
        self._typical = (0.0, 0.0)
        # Samples of the number of queued requests in the last minute.
        self._held: deque[tuple[float, int]] = deque()

    def add(self, now: float, *, uncached_tokens: int, cached_tokens: int) -> None:
        """Count a request that was dispatched."""
        bucket = self._bucket_at(now)
        bucket.requests += 1
        bucket.uncached_tokens += uncached_tokens
        work = _WORK.compute_s(uncached_tokens, cached_tokens)
        bucket.work += work
        bucket.work_squared += work * work

    def reject(self, now: float) -> None:
        """Count a request that was rejected."""
        self._bucket_at(now).rejected += 1

    def enqueue(self, now: float) -> None:
        """Count a queued request, which is traffic regardless of its outcome."""
        self._bucket_at(now).held += 1

    def first_token(self, now: float, *, within_slo: bool) -> None:
        """Count a first token."""
        bucket = self._bucket_at(now)
        bucket.first_tokens += 1
        bucket.slo_met += within_slo

    def arrivals(self, now: float, *, held: int) -> Arrivals:
        """Return the arrivals over the window, or a higher rate if the newest _RECENT_S show a surge.

        ``held`` is the number of queued requests now. Arrivals are the dispatched requests plus the growth of the
        queue, because saturated members receive no new requests.
        """
        buckets = self._last(now, WINDOW_S)
        requests = sum(each.requests for each in buckets)
        if requests:
            self._typical = (
                sum(each.uncached_tokens for each in buckets) / requests,
                sum(each.work for each in buckets) / requests,
            )
        whole, recent = self._rates(now, WINDOW_S, held), self._rates(now, _RECENT_S, held)
        significant = self._significant_share(now)
        tokens, work = (max(each, newest * significant) for each, newest in zip(whole, recent, strict=True))
        # At most one sample per interval, regardless of the number of calls.
        if not self._held or now - self._held[-1][0] >= _HELD_EVERY_S:
            self._held.append((now, held))
        while self._held[0][0] < now - WINDOW_S - _BUCKET_S:
            self._held.popleft()
        return Arrivals(
            traffic=any(each.requests or each.rejected or each.held for each in buckets),
            uncached_tokens_per_second=tokens,
            work_per_second=work,
            work_per_token=work / tokens if tokens else 1.0,
        )

    def first_tokens(self, now: float) -> FirstTokens:
        """Return the first tokens within WINDOW_S."""
        buckets = self._last(now, WINDOW_S)
        return FirstTokens(
            count=sum(each.first_tokens for each in buckets), slo_met=sum(each.slo_met for each in buckets)
        )

    def _rates(self, now: float, over_s: float, held: int) -> tuple[float, float]:
        """Return uncached tokens and work per second."""
        buckets = self._last(now, over_s)
        if not buckets or self._began_s is None:
            return 0.0, 0.0
        # After a start, the window is shorter, but has a minimum length for a useful rate.
        seconds = max(min(now - self._first_s(now, over_s), now - self._began_s), _RECENT_S - _BUCKET_S)
        others = sum(each.rejected for each in buckets) + self._queue_growth(now, held, seconds)
        tokens = sum(each.uncached_tokens for each in buckets) + others * self._typical[0]
        work = sum(each.work for each in buckets) + others * self._typical[1]
        return max(0.0, tokens) / seconds, max(0.0, work) / seconds

    def _queue_growth(self, now: float, held: int, seconds: float) -> float:
        """Return the growth of the queue within ``seconds``; the queue was empty before the first request."""
        at_s, held_before = now if self._began_s is None else self._began_s, 0
        for sampled_s, held_then in self._held:
            if sampled_s <= now - seconds:
                at_s, held_before = sampled_s, held_then
        return (held - held_before) * seconds / max(now - at_s, seconds)

    def _significant_share(self, now: float) -> float:
        """Return the statistically significant share of the work in the newest _RECENT_S."""
        buckets, (_, typical) = self._last(now, _RECENT_S), self._typical
        work = sum(each.work + each.rejected * typical for each in buckets)
        squared = sum(each.work_squared + each.rejected * typical * typical for each in buckets)
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
        """Return the start of a window's oldest bucket."""
        return now - now % _BUCKET_S - over_s + _BUCKET_S


class Scaling:
    """One router's share of a pool's desired replicas: ``window`` records requests, ``signals`` computes the share."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.window = LoadWindow()
        # The number of members that low attainment adds to the members that the arrivals need.
        self._extra = 0.0
        self._members = 0
        self._members_since_s = 0.0
        self._computed_s: float | None = None

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool: its objective and its prior of the speed."""
        self._pool = pool

    def signals(self, now: float, status: PoolSnapshot, *, others: Sequence[OtherRouter] | None = ()) -> PoolSignals:
        """Return the signals for autoscalers, from a present snapshot.

        ``others`` are the reports of the other routers. The rule uses the attainment of the complete pool, because one
        router's share may be too small to be significant. ``others`` is None if a router has not reported; low
        attainment then adds no members.
        """
        serving = _serving(status)
        backlog_tokens = waiting_tokens(status)
        arrivals = self.window.arrivals(now, held=status.held)
        own = self.window.first_tokens(now)
        needed = self._needed(arrivals, backlog_tokens, serving)
        self._note_members(now, len(serving))
        if not self._pool.prefill_pool:
            self._correct(now, own, needed, others)
        traffic = arrivals.traffic or status.held or backlog_tokens or any(each.in_flight for each in status.endpoints)
        if others and not traffic:
            # The routers that now receive the traffic add these members.
            self._extra = 0.0
        return PoolSignals(
            pending_prefill_tokens_per_endpoint=backlog_tokens / max(1, len(serving)),
            arriving_uncached_tokens_per_second=arrivals.uncached_tokens_per_second,
            slo_attainment=own.attainment,
            desired_replicas=max(needed + self._extra, _LEAST) if traffic else 0.0,
        )

    def _needed(self, arrivals: Arrivals, backlog_tokens: int, serving: list[EndpointStatus]) -> float:
        """Return the number of members for the arrivals and the late backlog."""
        speed = self._pool.engine.prefill_tokens_per_second
        if serving:
            # Use the solo speed: the shares of the other routers contain the prefills of these routers.
            speed = sum(each.solo_tokens_per_second for each in serving) / len(serving)
        # The maximum backlog while all requests meet the SLO, by Little's law.
        in_time = arrivals.work_per_second * self._pool.slo.ttft_s
        late = max(0.0, backlog_tokens * arrivals.work_per_token - in_time)
        # Late work needs no headroom: members may use their full speed for it.
        needed = (arrivals.work_per_second / _UTILISATION + late / WINDOW_S) / speed
        return max(needed, self._needed_memory(serving)) if self._pool.prefill_pool else needed

    def _needed_memory(self, serving: list[EndpointStatus]) -> float:
        """Return the number of members for the KV memory of the requests in flight and queued; 0 if unknown.

        Members of a pool with a prefill pool compute few prompts, so the first tokens do not show how many it needs.
        """
        given = self._pool.engine.kv_tokens
        known = [tokens for each in serving if (tokens := given or each.engine.kv_tokens)]
        if not known:
            return 0.0
        tokens = sum(each.active_kv_tokens + each.held_prefill_tokens for each in serving)
        return tokens / (_KV_UTILISATION * sum(known) / len(known))

    def _note_members(self, now: float, members: int) -> None:
        if members != self._members:
            self._members, self._members_since_s = members, now

    def _correct(self, now: float, own: FirstTokens, needed: float, others: Sequence[OtherRouter] | None) -> None:
        """Add members if the desired number of members misses the SLO, or remove added members.

        Misses during an unfinished scale-up add no members. Misses before the last change of the number of members do
        not count. All routers use the same attainment, members and desired replicas, and each router adds its share.
        """
        passed_s = 0.0 if self._computed_s is None else min(now - self._computed_s, WINDOW_S)
        self._computed_s = now
        reported = others or ()
        total = sum((each.first_tokens for each in reported), own)
        known = others is not None and total.count >= _FEWEST_FIRST_TOKENS
        goal, attainment = self._pool.slo.attainment, total.attainment if known else None
        if attainment is None or attainment >= (1.0 + goal) / 2:
            self._extra *= exp(-passed_s / _RELAX_S)
        elif attainment < goal:
            stable = now - self._members_since_s >= WINDOW_S
            desired = needed + self._extra + sum(each.desired_replicas for each in reported)
            if stable and desired <= self._members * _TOLERANCE:
                # Shares are proportional to first tokens, because some routers may have no traffic: Envoys keep their
                # connections.
                share = self._members * (own.count / total.count)
                growth = _GAIN * (1.0 - attainment / goal) * share * passed_s / WINDOW_S
                self._extra = max(self._extra, _fleet_share(self._members, own, reported) - needed) + growth


def _fleet_share(fleet: int, own: FirstTokens, others: Sequence[OtherRouter]) -> float:
    """Return a router's share of the members; the sum of the shares of all routers is the number of members.

    Each router's share is proportional to its first tokens. If a router's desired replicas exceed its share, its share
    is its desired replicas. The result does not depend on the number or order of the routers' computations.
    """
    left, count = float(fleet), own.count + sum(each.first_tokens.count for each in others)
    for each in sorted(others, key=_desired_per_first_token, reverse=True):
        if each.desired_replicas * count <= left * each.first_tokens.count:
            break
        left -= each.desired_replicas
        count -= each.first_tokens.count
    return left * (own.count / count) if own.count else 0.0


def _desired_per_first_token(other: OtherRouter) -> float:
    """Return a router's desired replicas per first token."""
    return other.desired_replicas / other.first_tokens.count if other.first_tokens.count else inf
