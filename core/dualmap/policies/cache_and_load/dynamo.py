"""Dynamo: the lowest sum of prefill blocks and active KV blocks (NVIDIA Dynamo's KV router)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_COST = Rule("least-blocks", "its sum of prefill blocks and active KV blocks is the lowest")


class Dynamo:
    """Chooses the lowest ``prefill_blocks + decode_blocks`` of all members, with Dynamo's default weights of 1.

    Prefill blocks are the uncached blocks of unfinished prefills and of the new prompt. Decode blocks are the distinct
    blocks of the prompts in flight and of the new prompt. Both include queued requests. The router does not know the
    generated tokens. All terms are counted in tokens, which does not change the order. Deviation: if its temperature
    is not 0 (the default), Dynamo chooses at random by softmax.
    """

    name: ClassVar[str] = "dynamo"
    source: ClassVar[str] = "NVIDIA Dynamo, KV router"
    summary: ClassVar[str] = "least prefill blocks plus decode blocks over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the lowest cost."""
        everyone, prompt = situation.everyone, situation.prompt_tokens
        columns = zip(everyone.pending_tokens(), everyone.distinct_tokens(), everyone.matched_tokens(), strict=True)
        costs = [pending + prompt - matched + distinct for pending, distinct, matched in columns]
        return Choice(situation.cheapest(costs), _LEAST_COST)
