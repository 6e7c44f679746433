"""Dynamo: the lowest sum of new prefill blocks and active KV blocks (NVIDIA Dynamo's KV router)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_COST = Rule("least-blocks", "its sum of new prefill blocks and active KV blocks is the lowest")


class Dynamo:
    """Chooses the lowest ``1.0 * new_prefill_blocks + decode_blocks`` of all members, with Dynamo's default weights.

    Both terms are counted in tokens, which does not change the order. Decode blocks are the blocks of the prompts in
    flight at a member, plus the blocks that its queued requests will add. The router does not know the generated
    tokens. Deviations: Dynamo also counts unfinished prefills as prefill blocks. If its temperature is not 0 (the
    default), Dynamo chooses at random by softmax.
    """

    name: ClassVar[str] = "dynamo"
    source: ClassVar[str] = "NVIDIA Dynamo, KV router"
    summary: ClassVar[str] = "least new prefill blocks plus decode blocks over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the lowest cost."""
        everyone, prompt = situation.everyone, situation.prompt_tokens
        columns = zip(everyone.placed_tokens(), everyone.matched_tokens(), strict=True)
        return Choice(situation.cheapest([placed + prompt - matched for placed, matched in columns]), _LEAST_COST)
