"""Shadow policies: what other policies would choose for a sample of a pool's requests, beside the pool's own choice.

A shadow policy chooses from the same state as the pool's own policy, by the same rules for sessions, adapters and
members that leave. Its choices change nothing: requests, indexes, queues and sessions follow the pool's own choices.
The figures are therefore predictions for single requests. They do not show what a policy would do to the whole traffic.

The sample depends on the requests' ids only. Policies have no state, and take turns by the number of the pool's choice.
Only the keys of hot prefixes need state: a shadow policy with another ``HotnessRule`` than the pool's own policy has
its own ``HotnessTree``, which counts the sample only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from dualmap.chooser import Chooser, best_of
from dualmap.fleet.fleet import Fleet
from dualmap.keys.hotness import HotnessRule, HotnessTree
from dualmap.keys.rings import DualRing
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Candidate, Policy, Situation
from dualmap.pools.pool import Pool
from dualmap.queue.request_queue import QueuedRequest
from dualmap.receipt import Key
from dualmap.requests import Request, ShadowStatus

# Policies draw lots by the same hash of the request id with small seeds (``Situation.lot``).
_SAMPLE_SEED: Final = 0x5AD0_5A3F_1E00_0001
_HASHES: Final = 2**64


class Comparison(NamedTuple):
    """A request of the sample, the number of the pool's own choice, and the present situations by ring and key."""

    request: Request
    sequence: int
    situations: dict[tuple[DualRing, Key], Situation]


class _Prediction(NamedTuple):
    """A policy's choice of member for a request, with the predicted TTFT from the request's arrival."""

    candidate: Candidate
    predicted_ttft_s: float


@dataclass(slots=True)
class _Totals:
    agreed: int = 0
    differed: int = 0
    predicted_ttft_s: float = 0.0
    predicted_cached_tokens: int = 0

    def add(self, *, agreed: bool, predicted_ttft_s: float, predicted_cached_tokens: int) -> None:
        """Add a request."""
        if agreed:
            self.agreed += 1
        else:
            self.differed += 1
        self.predicted_ttft_s += predicted_ttft_s
        self.predicted_cached_tokens += predicted_cached_tokens


class Shadows:
    """The shadow policies of one pool, and their totals. The other arguments are of the same pool."""

    def __init__(self, pool: Pool, chooser: Chooser, fleet: Fleet) -> None:
        self._chooser = chooser
        self._fleet = fleet
        self._totals: dict[str, _Totals] = {}
        self._trees: dict[HotnessRule, HotnessTree] = {}
        self._prefix = pool.routing.prefix
        self.adopt(pool)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool, which the chooser already has; the totals of policies that stay continue."""
        routing, self._slo_ttft_s = pool.routing, pool.slo.ttft_s
        if routing.prefix != self._prefix:
            self._trees, self._prefix = {}, routing.prefix
        self._own = self._chooser.policy
        self._policies = tuple(POLICIES[name] for name in routing.shadow if name != routing.policy)
        compared = (self._own, *self._policies) if routing.shadow else ()
        self._totals = {each.name: self._totals.get(each.name) or _Totals() for each in compared}
        self._sampled_below = int(routing.shadow_sample * _HASHES) if routing.shadow else 0
        rules = {each.hotness for each in self._policies} - {self._own.hotness}
        self._trees = {
            rule: self._trees.get(rule) or self._chooser.new_tree(pool, replicated=False)
            for rule in rules
            if rule is not None
        }

    def new_comparison(self, request: Request) -> Comparison | None:
        """Return a comparison of a new request, before the pool's own choice; None if it is not in the sample.

        Add the situations of the own choice to the comparison.
        """
        below = self._sampled_below
        if not below or xxh3_64_intdigest(request.id.encode(), _SAMPLE_SEED) >= below:
            return None
        return Comparison(request, self._chooser.sequence, {})

    def compare(
        self,
        now: float,
        comparison: Comparison,
        own: QueuedRequest,
        ring: DualRing,
        preferred: DualRing | None,
        leaving: Sequence[tuple[str, float]],
    ) -> None:
        """Let every shadow policy choose for a request, which the pool's own policy has placed.

        ``ring``, ``preferred`` and ``leaving`` are those of the own choice, as in ``best_of`` and
        ``Chooser.last_host``. Without preferred members, ``preferred`` is None.
        """
        self._totals[self._own.name].add(
            agreed=True, predicted_ttft_s=own.predicted_ttft_s, predicted_cached_tokens=own.matched_tokens
        )
        restores = self._fleet.candidates.keep(now)
        keys: dict[HotnessRule | None, Key] = {self._own.hotness: own.key}
        for policy in self._policies:
            rule = policy.hotness
            if rule not in keys:
                hot = None if rule is None else (rule, self._trees[rule])
                keys[rule] = self._chooser.key_by(now, own.request, hot)
            if preferred is None:
                chosen = self._choose(now, comparison, policy, keys[rule], ring)
            else:
                choose = partial(self._choose, now, comparison, policy, keys[rule])
                chosen = best_of(ring, preferred, choose, slo_ttft_s=self._slo_ttft_s)
            if leaving:
                chosen = self._last_turn(now, own.request, chosen, leaving)
            self._totals[policy.name].add(
                agreed=chosen.candidate.id == own.member,
                predicted_ttft_s=chosen.predicted_ttft_s,
                predicted_cached_tokens=chosen.candidate.matched_tokens,
            )
        for restore in restores:
            restore()

    def status(self) -> tuple[ShadowStatus, ...]:
        """Return the totals, those of the pool's own policy first; empty without shadow policies."""
        return tuple(
            ShadowStatus(
                policy=policy,
                agreed=totals.agreed,
                differed=totals.differed,
                predicted_ttft_s=totals.predicted_ttft_s,
                predicted_cached_tokens=totals.predicted_cached_tokens,
            )
            for policy, totals in self._totals.items()
        )

    def _choose(self, now: float, comparison: Comparison, policy: Policy, key: Key, ring: DualRing) -> _Prediction:
        """Choose a member of a ring by a policy."""
        situation = comparison.situations.get((ring, key))
        if situation is None:
            situation = self._chooser.situation(now, comparison.request, key, ring, sequence=comparison.sequence)
            comparison.situations[ring, key] = situation
        candidate = self._chooser.choice(policy, situation).candidate
        return _Prediction(candidate, situation.waited_s + candidate.ttft_s)

    def _last_turn(
        self, now: float, request: Request, chosen: _Prediction, leaving: Sequence[tuple[str, float]]
    ) -> _Prediction:
        """Return the member that leaves but still answers the request, or the chosen one if there is none."""
        host = self._chooser.last_host(
            now,
            request,
            leaving,
            held_tokens=chosen.candidate.matched_tokens + chosen.candidate.fetch_tokens,
            before_s=chosen.predicted_ttft_s,
            answer_s=self._fleet.answers.expected_s(),
        )
        return chosen if host is None else _Prediction(host, max(0.0, now - request.arrived_s) + host.ttft_s)
