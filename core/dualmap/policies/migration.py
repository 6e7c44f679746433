"""EAR's rule for sessions: decides whether a session's next turn goes to its host or moves to another member.

A session normally stays at the member with its KV, its host. The session moves if the host is hot and the session has
not moved within the cooldown. Another member must have much less load and enough memory for the session's context. If
several members are possible, the rule chooses the least loaded member. The new host computes the KV again, or fetches
it (``session.migration.pull``, or a KV store).

Deviations from EAR: the load threshold is relative, because with a fixed threshold sessions move constantly if all
members are hot. If the predicted TTFT exceeds ``spill.slo_fraction`` of the SLO, the host is hot. A target must have
less than ``hot_ratio`` of the host's pending prefill tokens. The policy ``ear`` implements the published rule.
"""

from dualmap.policies.situation import Candidate, Choice, Rule, Situation

SESSION_HOST = Rule("session-host", "it holds the KV of the session")
SESSION_MOVE = Rule("session-move", "the session's host is hot, and this member has much less pending prefill")


def session_choice(situation: Situation, host: Candidate, *, hot_ratio: float) -> Choice:
    """Return the host of the request's session, or the member to which the session moves."""
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
