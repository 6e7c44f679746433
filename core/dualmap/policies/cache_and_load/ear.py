"""EAR: binds each session to a host and moves the session if the host is hot."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.migration import SESSION_HOST
from dualmap.policies.situation import Choice, Rule, Situation

_NEW = Rule("new-session", "the session is new, and it has the least pending prefill")
_MOVE = Rule("session-move", "the session's host is hot, and this member has the least pending prefill")


class Ear:
    """Sends a new session to the member with the least pending prefill, and later turns to the session's host.

    A host is hot if it cannot compute its pending prefill within the SLO; the paper gives no threshold. A session of a
    hot host moves to the member with the least pending prefill. The session moves only under three conditions. The
    target has less pending prefill than the host. The target has enough memory for the session's context. The session
    has not moved within the pool's ``session.migration.cooldown``. The member that serves a turn becomes the session's
    host (``dualmap.keys.sessions``). A request without a session counts as a new session.

    Deviation: the KV is not transferred. ``session.migration`` is DualMap's variant of EAR for any policy
    (``dualmap.policies.migration``); it takes precedence over this policy.
    """

    name: ClassVar[str] = "ear"
    source: ClassVar[str] = "EAR (elastic affinity routing), section 4"
    summary: ClassVar[str] = "a session's host; sessions of a hot host move to the least pending prefill tokens"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the session's host, or the target of a new or moved session."""
        everyone, host = situation.everyone, situation.host
        pending_tokens = everyone.pending_tokens()
        if host is None:
            return Choice(situation.cheapest(pending_tokens), _NEW)
        hot_tokens = situation.slo_ttft_s * host.tokens_per_second
        if host.pending_tokens <= hot_tokens or not situation.may_move:
            return Choice(host, SESSION_HOST)
        most_placed = situation.room_tokens - situation.prompt_tokens
        loads = zip(pending_tokens, everyone.placed_tokens(), strict=True)
        targets = [
            pending if pending < host.pending_tokens and placed <= most_placed else inf for pending, placed in loads
        ]
        if min(targets) == inf:
            return Choice(host, SESSION_HOST)
        return Choice(situation.cheapest(targets), _MOVE)
