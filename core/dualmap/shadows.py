"""Shadow policies: what other policies would choose for a sample of a pool's requests, beside the pool's own choice.

A shadow policy chooses from the same state as the pool's own policy, by the same rules for sessions, adapters and
members that leave. Its choices change nothing: requests, indexes, queues and sessions follow the pool's own choices.
The figures are therefore predictions for single requests. They do not show what a policy would do to the whole traffic.

The sample depends on the requests' ids only. Policies without state need no further state for this. The hot prefixes
are different: a shadow policy with another ``HotnessRule`` than the pool's own policy has its own ``HotnessTree``,
which counts the sample only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from xxhash import xxh3_64_intdigest

from dualmap.chooser import Chooser
from dualmap.fleet.candidates import Candidates
from dualmap.keys.hotness import HotnessRule, HotnessTree
from dualmap.keys.rings import DualRing
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Policy, Situation
from dualmap.pools.pool import Pool
from dualmap.queue.request_queue import QueuedRequest
from dualmap.receipt import Key
from dualmap.requests import Request, ShadowStatus

# Policies draw lots by the same hash of the request id with small seeds (``Situation.lot``).
_SAMPLE_SEED: Final = 0x5AD0_5A3F_1E00_0001
_HASHES: Final = 2**64

Choose = Callable[[DualRing], QueuedRequest]
"""Chooses a member of a ring for a request."""


@dataclass(slots=True)
class _Totals:
    agreed: int = 0
    differed: int = 0
    predicted_ttft_s: float = 0.0
    predicted_cached_tokens: int = 0

    def add(self, placed: QueuedRequest, member: str) -> None:
        """Add a request as a policy placed it; ``member`` is the pool's own choice."""
        if placed.member == member:
            self.agreed += 1
        else:
            self.differed += 1
        self.predicted_ttft_s += placed.predicted_ttft_s
        self.predicted_cached_tokens += placed.matched_tokens


class Shadows:
    """The shadow policies of one pool, and their totals. The other arguments are of the same pool."""

    def __init__(self, pool: Pool, chooser: Chooser, candidates: Candidates) -> None:
        self._chooser = chooser
        self._candidates = candidates
        self._totals: dict[str, _Totals] = {}
        self._trees: dict[HotnessRule, HotnessTree] = {}
        self._prefix = pool.routing.prefix
        self.adopt(pool)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool; the totals of policies that stay continue."""
        routing = pool.routing
        if routing.prefix != self._prefix:
            self._trees, self._prefix = {}, routing.prefix
        self._own = POLICIES[routing.policy]
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

    def samples(self, request_id: str) -> bool:
        """Return whether a request is in the sample."""
        below = self._sampled_below
        return below > 0 and xxh3_64_intdigest(request_id.encode(), _SAMPLE_SEED) < below

    def compare(
        self, now: float, own: QueuedRequest, place: Callable[[Choose], QueuedRequest], *, sequence: int
    ) -> None:
        """Let every shadow policy choose for a request of the sample, which the pool's own policy has placed.

        ``place`` places the request by a function that chooses. ``sequence`` is the number of the own choice.
        """
        self._totals[self._own.name].add(own, own.member)
        keys: dict[HotnessRule | None, Key] = {self._own.hotness: own.key}
        situations: dict[tuple[DualRing, Key], Situation] = {}
        with self._candidates.kept(now):
            for policy in self._policies:
                rule = policy.hotness
                if rule not in keys:
                    hot = None if rule is None else (rule, self._trees[rule])
                    keys[rule] = self._chooser.key_by(now, own.request, hot)
                choose = partial(self._choose, now, own.request, policy, keys[rule], sequence, situations)
                self._totals[policy.name].add(place(choose), own.member)

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

    def _choose(
        self,
        now: float,
        request: Request,
        policy: Policy,
        key: Key,
        sequence: int,
        situations: dict[tuple[DualRing, Key], Situation],
        ring: DualRing,
    ) -> QueuedRequest:
        """Choose a member of a ring by a policy; ``situations`` has the situations of earlier choices."""
        situation = situations.get((ring, key))
        if situation is None:
            situation = self._chooser.situation(now, request, key, ring, sequence=sequence)
            situations[ring, key] = situation
        return self._chooser.choose_by(policy, request, key, situation)
