"""Where a session's next turn goes if sessions stay with their host: EAR's move rule.

A session stays where its KV is. It moves when its host is hot, the session has not moved within the cooldown, and there
is a member with room for its context and a much smaller load. The least loaded of those becomes its host. The KV is not
transferred: the new host computes it again.

Deviations: hot is relative, since sessions thrash at a fixed threshold when all members are hot. The host is hot when
its predicted TTFT exceeds the share of the SLO at which the ``dualmap`` policy leaves a pair, and a target must have
less than ``hot_ratio`` of the host's pending prefill tokens. The policy ``ear`` is the rule as published.
"""

from dualmap.policies.situation import Candidate, Choice, Rule, Situation

SESSION_HOST = Rule("session-host", "the KV of its session lies there")
SESSION_MOVE = Rule("session-move", "the instance that holds its session is hot, and this one has much less to do")


def session_choice(situation: Situation, host: Candidate, *, hot_ratio: float) -> Choice:
    """Return the host of the request's session, or where the session moves."""
    hot_s = situation.spill.slo_fraction * situation.slo_ttft_s
    if not situation.may_move or situation.waited_s + host.ttft_s <= hot_s:
        return Choice(host, SESSION_HOST)
    targets = [
        each
        for each in situation.everyone
        if each.pending_tokens < hot_ratio * host.pending_tokens
        and each.active_kv_tokens + situation.prompt_tokens <= situation.room_tokens
    ]
    if not targets:
        return Choice(host, SESSION_HOST)
    return Choice(situation.least(targets, lambda each: (each.pending_tokens, each.in_flight)), SESSION_MOVE)
