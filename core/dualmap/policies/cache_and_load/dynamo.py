"""Dynamo: the least of new prefill and active KV, in blocks (NVIDIA Dynamo's KV router)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_COST = Rule("least-blocks", "its new prefill and active KV blocks are together the fewest")


class Dynamo:
    """The least ``1.0 * new_prefill_blocks + decode_blocks`` over all members, the weights being Dynamo's defaults.

    Both terms are counted in tokens, which leaves their order unchanged. Decode blocks are those of the prompts in
    flight at a member, and those that its queue will add; tokens already generated are unknown here. Deviations: Dynamo
    counts prefills that have not ended a second time, among the prefill blocks. It draws by softmax if its temperature
    is not 0, its default.
    """

    name: ClassVar[str] = "dynamo"
    source: ClassVar[str] = "NVIDIA Dynamo, KV router"
    summary: ClassVar[str] = "least new prefill blocks plus decode blocks over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member of least cost."""
        everyone, prompt = situation.everyone, situation.prompt_tokens
        columns = zip(everyone.placed_tokens(), everyone.matched_tokens(), strict=True)
        return Choice(situation.cheapest([placed + prompt - matched for placed, matched in columns]), _LEAST_COST)
