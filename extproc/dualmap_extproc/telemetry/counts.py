"""Counts observations of requests by pool and endpoint, and converts the counts to Prometheus series at a scrape.

``RequestCounts`` subscribes to observations and counts in plain numbers. A counter of prometheus_client takes 1 us per
increment, and a histogram 2 us per observation. An update of a plain number takes a tenth to a twentieth of this time.

The event loop writes the numbers while another thread may read them. Each number is correct, but two numbers may differ
by one event. For a removed endpoint or pool, ``set_pools`` also removes all counts and series.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import Completion
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observations import (
    Abandoned,
    ClientLimited,
    Decided,
    Ended,
    Expired,
    FanOut,
    FirstTokenSeen,
    Measured,
    PickNotFollowed,
    Rejected,
    RemotelyDecided,
    Routed,
    RoutedBodiless,
    ServedElsewhere,
    Tokenized,
    TokensMismatched,
)

# The bounds cover the TTFT objectives of pools: 100 ms to 10 min by the CRD's schema, usually seconds (5 s in the
# paper).
_TTFT_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, 120)
# The last bound is the longest queueing time that pools may set, 10 min.
_QUEUED_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
# A decision takes a few hundred microseconds, and milliseconds for a long prompt.
_DECISION_BUCKETS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)

# An owner in the same cluster answers within a few milliseconds; the router waits for an answer for 20 ms.
_REMOTE_BUCKETS_S: Final = (5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 1e-2, 1.5e-2, 2e-2, 2.5e-2, 5e-2, 0.1)
# Tokenizing takes microseconds for text seen before, and at most the router's deadline for it.
_TOKENIZE_BUCKETS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)

_POOL: Final = ("pool",)
_ENDPOINT: Final = ("pool", "endpoint")
_MET, _MISSED = "met", "missed"
_FETCHED, _RECOMPUTED = _MOVED_KV = "fetched", "recomputed"
_EXPIRED: Final = "expired"
_LOCAL: Final = "local"
_REMOTE_RESULTS: Final = ("answered", "timeout", "refused", _LOCAL)
_OUTCOMES: Final = (*(ending.value for ending in Ending), _EXPIRED)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Totals of one pool's requests since this router began to serve it; every number only grows.

    ``first_tokens`` counts responses with an observed first token (event streams). ``slo_met`` counts first tokens
    within the SLO. ``prompt_tokens`` and ``predicted_cached_tokens`` are the router's estimates for all requests that
    it routed. ``measured_cached_tokens`` is the sum of the engines' reports.
    """

    requests: int = 0
    refused: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    measured_cached_tokens: int = 0


class Distribution:
    """A histogram: counts of values up to each of the ascending ``bounds`` and above the last bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return the count of values up to each bound, followed by the count of all values."""
        return list(accumulate(self._counts))


@dataclass(slots=True, kw_only=True)
class _EndpointCounts:
    """Counts of one endpoint; ``checked_cached_tokens`` are the predicted cached tokens of measured requests.

    ``predicted_hits`` and ``stale_hits`` also count measured requests only.
    """

    requests: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    checked_cached_tokens: int = 0
    measured_cached_tokens: int = 0
    predicted_hits: int = 0
    stale_hits: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_OUTCOMES, 0))
    first_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys((_MET, _MISSED), 0))


@dataclass(slots=True, kw_only=True)
class _PoolCounts:
    """Counts of one pool, and of its endpoints by member id."""

    ttft_s: Distribution = field(default_factory=lambda: Distribution(_TTFT_BUCKETS_S))
    predicted_ttft_s: Distribution = field(default_factory=lambda: Distribution(_TTFT_BUCKETS_S))
    queued_s: Distribution = field(default_factory=lambda: Distribution(_QUEUED_BUCKETS_S))
    tokenize_s: Distribution = field(default_factory=lambda: Distribution(_TOKENIZE_BUCKETS_S))
    tokenizer_mismatches: int = 0
    bodiless: int = 0
    served_elsewhere: int = 0
    picks_not_followed: int = 0
    clients_limited: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    endpoints: dict[str, _EndpointCounts] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    prefills: dict[str, int] = field(default_factory=dict)
    session_moves: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_MOVED_KV, 0))
    session_move_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_MOVED_KV, 0))
    rejections: dict[str, int] = field(default_factory=dict)
    remote: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REMOTE_RESULTS, 0))


# Name, help text, and a function that reads the value from the counts.
_ENDPOINT_COUNTERS: Final[tuple[tuple[str, str, Callable[[_EndpointCounts], int]], ...]] = (
    ("dualmap_requests", "Requests sent to the endpoint.", lambda counts: counts.requests),
    ("dualmap_prompt_tokens", "Prompt tokens sent to the endpoint, estimated.", lambda counts: counts.prompt_tokens),
    (
        "dualmap_predicted_cached_tokens",
        "Prompt tokens predicted to be cached.",
        lambda counts: counts.predicted_cached_tokens,
    ),
    (
        "dualmap_checked_cached_tokens",
        "Prompt tokens predicted to be cached, of requests whose cached tokens were measured.",
        lambda counts: counts.checked_cached_tokens,
    ),
    (
        "dualmap_measured_cached_tokens",
        "Prompt tokens that the engine reported as cached.",
        lambda counts: counts.measured_cached_tokens,
    ),
    (
        "dualmap_predicted_hit_requests",
        "Requests predicted to have a cached block, whose cached tokens were measured.",
        lambda counts: counts.predicted_hits,
    ),
    (
        "dualmap_stale_hit_requests",
        "Requests predicted to have a cached block, of which the engine reported none.",
        lambda counts: counts.stale_hits,
    ),
)
# Further counters of endpoints, with an additional label.
_ENDPOINT_KINDS: Final[tuple[tuple[str, str, str, Callable[[_EndpointCounts], dict[str, int]]], ...]] = (
    ("dualmap_completions", "Requests that ended, by outcome.", "outcome", lambda counts: counts.outcomes),
    ("dualmap_first_tokens", "First tokens, within the SLO or not.", "slo", lambda counts: counts.first_tokens),
)
_POOL_COUNTERS: Final[tuple[tuple[str, str, Callable[[_PoolCounts], int]], ...]] = (
    ("dualmap_bodiless_requests", "Requests without a prompt, sent to any endpoint.", lambda counts: counts.bodiless),
    (
        "dualmap_served_elsewhere",
        "Requests served by another endpoint than the chosen one.",
        lambda counts: counts.served_elsewhere,
    ),
    (
        "dualmap_picks_not_followed",
        "Requests that the gateway sent to none of the endpoints that the pick named.",
        lambda counts: counts.picks_not_followed,
    ),
    (
        "dualmap_clients_limited",
        "Requests rejected because the queue was full and the client had its share of it.",
        lambda counts: counts.clients_limited,
    ),
    (
        "dualmap_tokenizer_mismatches",
        "Requests of which the engine counted another number of prompt tokens than the router's token ids.",
        lambda counts: counts.tokenizer_mismatches,
    ),
)
_POOL_DISTRIBUTIONS: Final[tuple[tuple[str, str, Sequence[float], Callable[[_PoolCounts], Distribution]], ...]] = (
    (
        "dualmap_ttft_seconds",
        "Time from arrival to first token, in seconds.",
        _TTFT_BUCKETS_S,
        lambda counts: counts.ttft_s,
    ),
    (
        "dualmap_predicted_ttft_seconds",
        "Time from arrival to first token as predicted at the decision, in seconds.",
        _TTFT_BUCKETS_S,
        lambda counts: counts.predicted_ttft_s,
    ),
    (
        "dualmap_held_seconds",
        "Time that queued requests waited in the router, in seconds.",
        _QUEUED_BUCKETS_S,
        lambda counts: counts.queued_s,
    ),
    (
        "dualmap_tokenize_seconds",
        "Time to compute a request's token ids, or to give up, in seconds.",
        _TOKENIZE_BUCKETS_S,
        lambda counts: counts.tokenize_s,
    ),
)


class RequestCounts(Collector):
    """The counts of one router. Only ``collect`` may run outside the event loop's thread.

    Call ``set_pools`` with a pool or member before the first observation of it. Observations of a removed endpoint
    count for the pool only.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _PoolCounts] = {}
        self._decision_s = Distribution(_DECISION_BUCKETS_S)
        self._remote_s = Distribution(_REMOTE_BUCKETS_S)
        # Rejections of requests without a known pool, by code.
        self._poolless: dict[str, int] = {}

    @property
    def pools(self) -> set[str]:
        """The ``namespace/name`` of each counted pool."""
        return set(self._pools)

    def subscribe(self, observations: FanOut) -> None:
        """Subscribe to the observations that are counted."""
        observations.subscribe(Routed, self._routed)
        observations.subscribe(RoutedBodiless, self._routed_bodiless)
        observations.subscribe(Rejected, self._rejected)
        observations.subscribe(ClientLimited, self._client_limited)
        observations.subscribe(Abandoned, self._abandoned)
        observations.subscribe(Decided, self._decided)
        observations.subscribe(RemotelyDecided, self._remotely_decided)
        observations.subscribe(FirstTokenSeen, self._first_token)
        observations.subscribe(Ended, self._ended)
        observations.subscribe(Expired, self._expired)
        observations.subscribe(Measured, self._measured)
        observations.subscribe(ServedElsewhere, self._served_elsewhere)
        observations.subscribe(PickNotFollowed, self._pick_not_followed)
        observations.subscribe(Tokenized, self._tokenized)
        observations.subscribe(TokensMismatched, self._tokens_mismatched)

    def set_pools(self, pools: Iterable[Pool]) -> None:
        """Keep the counts of these pools and their members, and discard the counts of all others."""
        members = {pool.id: {member.id for member in pool.members} for pool in pools}
        for pool in self._pools.keys() - members.keys():
            del self._pools[pool]
        for pool, present in members.items():
            endpoints = self._pools.setdefault(pool, _PoolCounts()).endpoints
            for endpoint in endpoints.keys() - present:
                del endpoints[endpoint]
            for endpoint in sorted(present - endpoints.keys()):
                endpoints[endpoint] = _EndpointCounts()

    def traffic(self, pool: str) -> Traffic:
        """Return a pool's totals (``pool`` is ``namespace/name``); zeros for an unknown pool."""
        counts = self._pools.get(pool)
        return Traffic() if counts is None else counts.traffic

    def collect(self) -> Iterator[Metric]:
        """Yield every family (prometheus_client's Collector), in the scrape's thread."""
        # This thread copies dictionaries to lists, because the event loop may add a pool, an endpoint or a rule
        # meanwhile.
        pools = list(self._pools.items())
        yield from _endpoint_families(pools)
        for name, text, pool_count in _POOL_COUNTERS:
            family = CounterMetricFamily(name, text, labels=_POOL)
            for pool, counts in pools:
                family.add_metric((pool,), pool_count(counts))
            yield family
        rules = [(pool, counts.rules) for pool, counts in pools]
        yield _by_kind("dualmap_decisions", "Routing decisions, by rule.", "rule", rules)
        prefills = [(pool, counts.prefills) for pool, counts in pools]
        text = "Requests of a pool with a prefill pool, by where the prompt is computed, or why at the chosen member."
        yield _by_kind("dualmap_prefills", text, "where", prefills)
        moves = [(pool, counts.session_moves) for pool, counts in pools]
        text = (
            "Requests of sessions that went to another endpoint than the session's last one, by whether the router "
            "predicts a fetch of KV."
        )
        yield _by_kind("dualmap_session_moves", text, "kv", moves)
        moved = [(pool, counts.session_move_tokens) for pool, counts in pools]
        text = "Prompt tokens of moved sessions that the new endpoint did not cache, as predicted, by a fetch or not."
        yield _by_kind("dualmap_session_move_tokens", text, "kv", moved)
        rejections = [("", self._poolless), *((pool, counts.rejections) for pool, counts in pools)]
        yield _by_kind("dualmap_refused_requests", "Requests answered with an error, by code.", "code", rejections)
        for name, text, bounds, distribution in _POOL_DISTRIBUTIONS:
            histogram = HistogramMetricFamily(name, text, labels=_POOL)
            for pool, counts in pools:
                _add(histogram, (pool,), bounds, distribution(counts))
            yield histogram
        remote = [(pool, counts.remote) for pool, counts in pools]
        text = "Routing decisions of which another router is the pool's owner, by how they were made."
        yield _by_kind("dualmap_remote_decisions", text, "result", remote)
        for name, text, bounds, distribution_s in (
            (
                "dualmap_decision_seconds",
                "Time from a whole request body to the answer, in seconds.",
                _DECISION_BUCKETS_S,
                self._decision_s,
            ),
            (
                "dualmap_remote_decision_seconds",
                "Time from a question to the pool's owner to its answer, or to the decision without it, in seconds.",
                _REMOTE_BUCKETS_S,
                self._remote_s,
            ),
        ):
            decisions = HistogramMetricFamily(name, text, labels=())
            _add(decisions, (), bounds, distribution_s)
            yield decisions

    def _routed(self, routed: Routed) -> None:
        counts = self._pools.get(routed.pool)
        if counts is None:
            return
        if routed.queued_s is not None:
            counts.queued_s.observe(routed.queued_s)
        receipt = routed.decision.receipt
        _count_request(counts, receipt)
        if receipt.moved_from:
            _count_move(counts, receipt)
        prefill = receipt.prefill
        if prefill is not None:
            where = prefill.where
            counts.prefills[where] = counts.prefills.get(where, 0) + 1
            prefilling = None if prefill.receipt is None else self._pools.get(prefill.receipt.pool)
            if prefill.receipt is not None and prefilling is not None:
                _count_request(prefilling, prefill.receipt)

    def _routed_bodiless(self, routed: RoutedBodiless) -> None:
        if routed.pool in self._pools:
            self._pools[routed.pool].bodiless += 1

    def _rejected(self, rejected: Rejected) -> None:
        """Count an error answer; without a known pool, its ``pool`` label is empty."""
        counts = self._pools.get(rejected.pool)
        if counts is not None:
            counts.traffic.refused += 1
            if rejected.queued_s is not None:
                counts.queued_s.observe(rejected.queued_s)
        rejections = self._poolless if counts is None else counts.rejections
        code = rejected.refused.code
        rejections[code] = rejections.get(code, 0) + 1

    def _client_limited(self, limited: ClientLimited) -> None:
        if limited.pool in self._pools:
            self._pools[limited.pool].clients_limited += 1

    def _abandoned(self, abandoned: Abandoned) -> None:
        counts = self._pools.get(abandoned.pool)
        if counts is not None and abandoned.queued_s is not None:
            counts.queued_s.observe(abandoned.queued_s)

    def _decided(self, decided: Decided) -> None:
        self._decision_s.observe(decided.seconds)

    def _remotely_decided(self, decided: RemotelyDecided) -> None:
        counts = self._pools.get(decided.pool)
        if counts is not None:
            counts.remote[decided.result] += 1
        if decided.result != _LOCAL:
            self._remote_s.observe(decided.seconds)

    def _first_token(self, seen: FirstTokenSeen) -> None:
        counts, first_token = self._pools.get(seen.pool), seen.first_token
        if counts is None:
            return
        counts.ttft_s.observe(first_token.ttft_s)
        counts.predicted_ttft_s.observe(first_token.predicted_ttft_s)
        counts.traffic.first_tokens += 1
        counts.traffic.slo_met += first_token.within_slo
        endpoint = counts.endpoints.get(first_token.member)
        if endpoint is not None:
            endpoint.first_tokens[_MET if first_token.within_slo else _MISSED] += 1

    def _ended(self, ended: Ended) -> None:
        self._count_outcome(ended.pool, ended.completion, ended.ending.value)

    def _expired(self, expired: Expired) -> None:
        self._count_outcome(expired.pool, expired.completion, _EXPIRED)

    def _measured(self, measured: Measured) -> None:
        """Count a request's cached tokens: the engine's report, and the prediction for the same request."""
        counts, completion = self._pools.get(measured.pool), measured.completion
        if counts is None or completion.measured_cached_tokens is None:
            return
        counts.traffic.measured_cached_tokens += completion.measured_cached_tokens
        endpoint = counts.endpoints.get(completion.member)
        if endpoint is not None:
            endpoint.checked_cached_tokens += completion.predicted_cached_tokens
            endpoint.measured_cached_tokens += completion.measured_cached_tokens
            endpoint.predicted_hits += completion.predicted_hit
            endpoint.stale_hits += completion.stale_hit

    def _served_elsewhere(self, served: ServedElsewhere) -> None:
        if served.pool in self._pools:
            self._pools[served.pool].served_elsewhere += 1

    def _pick_not_followed(self, not_followed: PickNotFollowed) -> None:
        if not_followed.pool in self._pools:
            self._pools[not_followed.pool].picks_not_followed += 1

    def _tokenized(self, tokenized: Tokenized) -> None:
        if tokenized.pool in self._pools:
            self._pools[tokenized.pool].tokenize_s.observe(tokenized.seconds)

    def _tokens_mismatched(self, mismatched: TokensMismatched) -> None:
        if mismatched.pool in self._pools:
            self._pools[mismatched.pool].tokenizer_mismatches += 1

    def _count_outcome(self, pool: str, completion: Completion, outcome: str) -> None:
        counts = self._pools.get(pool)
        endpoint = None if counts is None else counts.endpoints.get(completion.member)
        if endpoint is not None:
            endpoint.outcomes[outcome] += 1


def _count_request(counts: _PoolCounts, receipt: Receipt) -> None:
    """Count a request that was sent to a member of a pool."""
    traffic = counts.traffic
    traffic.requests += 1
    traffic.prompt_tokens += receipt.prompt_tokens
    traffic.predicted_cached_tokens += receipt.matched_tokens
    counts.rules[receipt.rule] = counts.rules.get(receipt.rule, 0) + 1
    endpoint = counts.endpoints.get(receipt.chosen)
    if endpoint is not None:
        endpoint.requests += 1
        endpoint.prompt_tokens += receipt.prompt_tokens
        endpoint.predicted_cached_tokens += receipt.matched_tokens


def _count_move(counts: _PoolCounts, receipt: Receipt) -> None:
    """Count a request whose session moves to another member."""
    fetched = receipt.fetch_tokens or 0
    counts.session_moves[_FETCHED if fetched else _RECOMPUTED] += 1
    counts.session_move_tokens[_FETCHED] += fetched
    counts.session_move_tokens[_RECOMPUTED] += receipt.prompt_tokens - receipt.matched_tokens - fetched


def _endpoint_families(pools: Sequence[tuple[str, _PoolCounts]]) -> Iterator[Metric]:
    endpoints = [((pool, each), counted) for pool, counts in pools for each, counted in list(counts.endpoints.items())]
    for name, text, count in _ENDPOINT_COUNTERS:
        family = CounterMetricFamily(name, text, labels=_ENDPOINT)
        for labels, counted in endpoints:
            family.add_metric(labels, count(counted))
        yield family
    for name, text, label, kinds in _ENDPOINT_KINDS:
        family = CounterMetricFamily(name, text, labels=(*_ENDPOINT, label))
        for labels, counted in endpoints:
            for kind, number in kinds(counted).items():
                family.add_metric((*labels, kind), number)
        yield family


def _by_kind(name: str, text: str, label: str, pools: Sequence[tuple[str, Mapping[str, int]]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(*_POOL, label))
    for pool, kinds in pools:
        for kind, number in list(kinds.items()):
            family.add_metric((pool, kind), number)
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], of: Distribution) -> None:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, of.cumulative(), strict=True)), sum_value=of.total)
