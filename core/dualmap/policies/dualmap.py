"""DualMap, the default: the pair while it is fast enough, then the least marginal cost over all members."""

from typing import ClassVar

from dualmap.hotness import HotnessRule
from dualmap.situation import Choice, Rule, Situation, Weights

_PAIR_MARGINAL = Rule("pair-marginal", "the pair is too slow, and yet this member of it costs least of all members")
_SPILL = Rule("spill", "the pair is too slow, and this member costs least of all members")


class DualMap:
    """The warmer of the pair while its predicted TTFT stays within a fraction of the SLO; otherwise spill.

    A spill minimises ``T_q + prefillWeight * T_c + activeKvWeight * active_KV / speed`` over all members: T_c weighs
    more than once because work done here is work others wait for, and active KV stands for the decode work that will
    compete. Deviations from the published rule (``dualmap_paper``): the switch comes at ``sloFraction`` of the SLO
    instead of the whole, and leaves the pair instead of taking its less loaded member, which past saturation trades
    every hit for balance (docs/adr/0004-default-policy.md). Prefixes count as hot from 1/n of the traffic on.
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
        """Return one of the pair, or of everyone once the pair is too slow."""
        warm, rule = situation.warmest()
        spill = situation.spill
        if situation.waited_s + warm.ttft_s <= spill.slo_fraction * situation.slo_ttft_s:
            return Choice(warm, rule)

        weights = Weights(compute=spill.prefill_weight, active_kv=spill.active_kv_weight)
        cheapest = situation.cheapest(situation.everyone.costs_s(weights))
        in_pair = any(cheapest.id == each.id for each in situation.pair)
        return Choice(cheapest, _PAIR_MARGINAL if in_pair else _SPILL)
