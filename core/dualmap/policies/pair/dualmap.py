"""DualMap, the default policy: chooses within the pair if the pair is fast enough, else from all members."""

from typing import ClassVar, Final

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import PAIR_EQUAL, Candidate, Choice, Rule, Situation, Weights

_PAIR_MARGINAL = Rule(
    "pair-marginal", "the pair is too slow, and this member of the pair has the lowest cost of all members"
)
_SPILL = Rule("spill", "the pair is too slow, and this member has the lowest cost of all members")
_PAIR_COLD = Rule(
    "pair-cold", "both of the pair have the same part of the prompt cached, and this member costs less than either"
)

_EQUAL_S: Final = 0.02
"""Costs with at most this difference count as equal.

The estimates are not more precise than this, and the pair also serves later requests with the same key.
"""
_EQUAL_PART: Final = 0.25
"""Two compute times of the same tokens count as equal if they differ by at most this part.

Speeds are not known more precisely.
"""


class DualMap:
    """Chooses the longer match of the pair if its predicted TTFT is low enough, else the lowest marginal cost.

    The marginal cost is ``T_q + prefillWeight * T_c + activeKvWeight * active_KV / speed`` (T_q and T_c: paper eq. 7).
    The member with the lowest marginal cost is chosen. T_c has a weight above 1 because other requests wait for this
    prefill. Active KV represents competing decode work. Marginal cost also decides if both members of the pair have the
    same match; at equal cost, a member of the pair is chosen. Queued requests that will miss the SLO are deferred.

    There are three deviations from the published rule (``dualmap_paper``). The limit is ``sloFraction`` of the SLO, not
    the full SLO. Above the limit, the request may go to a member outside the pair. In a saturated pool, the published
    choice of the less loaded member would lose almost all cache hits (docs/adr/0004-default-policy.md). A prefix is hot
    from 1/n of the traffic, for n members.
    """

    name: ClassVar[str] = "dualmap"
    source: ClassVar[str] = "DualMap section 3.2 with a marginal-cost spill"
    summary: ClassVar[str] = (
        "the longer match of the pair within part of the SLO, else least marginal cost over all (default)"
    )
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=1.0, merge=0.5)
    rebalances: ClassVar[bool] = True
    defers: ClassVar[bool] = True

    def choose(self, situation: Situation) -> Choice:
        """Return the longer match of the pair, or the lowest marginal cost if the match is too slow or equal."""
        warm, rule = situation.warmest()
        spill = situation.spill
        fast = situation.waited_s + warm.ttft_s <= spill.slo_fraction * situation.slo_ttft_s
        if fast and rule is not PAIR_EQUAL:
            return Choice(warm, rule)

        weights = Weights(compute=spill.prefill_weight, active_kv=spill.active_kv_weight)
        cheapest = situation.cheapest(situation.everyone.costs_s(weights))
        if fast:
            # ``warm`` is the less loaded member of the pair here.
            usual = (warm, *situation.pair)
            evened_s = [_evened_cost_s(each, warm, weights) for each in (*usual, cheapest)]
            for each, cost_s in zip(usual, evened_s, strict=False):
                if cost_s <= min(evened_s) + _EQUAL_S:
                    return Choice(each, rule)
            return Choice(cheapest, _PAIR_COLD)
        in_pair = any(cheapest.id == each.id for each in situation.pair)
        return Choice(cheapest, _PAIR_MARGINAL if in_pair else _SPILL)


def _evened_cost_s(candidate: Candidate, warm: Candidate, weights: Weights) -> float:
    """Return a candidate's cost; with the compute time of ``warm`` if it computes the same tokens in a similar time."""
    if (
        candidate.compute_s != warm.compute_s
        and candidate.matched_tokens == warm.matched_tokens
        and abs(candidate.compute_s - warm.compute_s) <= _EQUAL_PART * warm.compute_s
    ):
        candidate = candidate._replace(compute_s=warm.compute_s)
    return weights.cost_s(candidate)
