"""EAR's move rule: the member for a session's next turn while sessions stay with their host.

A session stays where its KV is. The session moves when its host is hot, it has not moved within the cooldown, and a
member has room for its context and a much smaller load. The least loaded such member is chosen. The KV is not
transferred; the new host computes it again.

Deviations: the threshold is relative, since with a fixed one sessions thrash when all members are hot. The host is hot
when its predicted TTFT exceeds the share of the SLO at which the ``dualmap`` policy leaves a pair. A target must have
less than ``hot_ratio`` of the host's pending prefill tokens. The policy ``ear`` is the rule as published.
"""

from dualmap.policies.situation import Candidate, Choice, Rule, Situation

SESSION_HOST = Rule("session-host", "it holds the KV of the session")
SESSION_MOVE = Rule("session-move", "the session's host is hot, and this member has much less pending prefill")


def session_choice(situation: Situation, host: Candidate, *, hot_ratio: float) -> Choice:
    """Return the host of the request's session, or the member the session moves to."""
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
