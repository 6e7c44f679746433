"""DualMap, the default: the pair where it pays and is fast enough, else the least marginal cost over all members."""

from typing import ClassVar, Final

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import PAIR_EQUAL, Choice, Rule, Situation, Weights

_PAIR_MARGINAL = Rule("pair-marginal", "the pair is too slow, and yet this member of it costs least of all members")
_SPILL = Rule("spill", "the pair is too slow, and this member costs least of all members")
_PAIR_COLD = Rule("pair-cold", "both of its pair hold as much of the prompt, and this member costs less than either")

_EQUAL_S: Final = 0.02
"""Costs this close count as equal: estimates cannot distinguish them, and later requests look at the pair."""


class DualMap:
    """The warmer of the pair while its predicted TTFT stays within a fraction of the SLO; otherwise marginal cost.

    The marginal cost is ``T_q + prefillWeight * T_c + activeKvWeight * active_KV / speed``, and the least over all
    members wins. T_c weighs more than once because other requests wait for this work, and active KV stands for the
    decode work that competes. Marginal cost also decides if both of the pair hold as much of the prompt; at equal cost
    the pair wins. Queued requests that will miss the SLO are deferred. Deviations from the published rule
    (``dualmap_paper``): the switch comes at ``sloFraction`` of the SLO instead of the whole. It leaves the pair instead
    of taking its less loaded member, which beyond saturation trades every hit for balance
    (docs/adr/0004-default-policy.md). Prefixes are hot from 1/n of the traffic on.
    """

    name: ClassVar[str] = "dualmap"
    source: ClassVar[str] = "DualMap section 3.2 with a marginal-cost spill"
    summary: ClassVar[str] = (
        "the warmer of the pair within part of the SLO, else least marginal cost over all (default)"
    )
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=1.0, merge=0.5)
    rebalances: ClassVar[bool] = True
    defers: ClassVar[bool] = True

    def choose(self, situation: Situation) -> Choice:
        """Return the warmer of the pair, or of everyone once the pair is too slow or holds nothing of its own."""
        warm, rule = situation.warmest()
        spill = situation.spill
        fast = situation.waited_s + warm.ttft_s <= spill.slo_fraction * situation.slo_ttft_s
        if fast and rule is not PAIR_EQUAL:
            return Choice(warm, rule)

        weights = Weights(compute=spill.prefill_weight, active_kv=spill.active_kv_weight)
        costs_s = situation.everyone.costs_s(weights)
        if fast:
            usual = situation.least(
                situation.pair, lambda each: (weights.cost_s(each), each.pending_tokens, each.in_flight)
            )
            if weights.cost_s(usual) <= min(costs_s) + _EQUAL_S:
                return Choice(usual, rule)
            return Choice(situation.cheapest(costs_s), _PAIR_COLD)
        cheapest = situation.cheapest(costs_s)
        in_pair = any(cheapest.id == each.id for each in situation.pair)
        return Choice(cheapest, _PAIR_MARGINAL if in_pair else _SPILL)
