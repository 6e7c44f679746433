"""EAR: sessions bound to a host, moved when it is hot."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.migration import SESSION_HOST
from dualmap.policies.situation import Choice, Rule, Situation

_NEW = Rule("new-session", "its session is new here, and no member has less prefill pending")
_MOVE = Rule("session-move", "the instance that holds its session is hot, and this one has the least prefill pending")


class Ear:
    """A new session goes where the least prefill is pending, later turns to its host unless that is hot.

    The host is hot when more prefill is pending there than it computes within the SLO: the seed leaves its threshold
    open. Then a session that has not moved within the pool's ``session.migration.cooldown`` moves to the member with
    the least prefill pending, if that is less than the host's and there is room for its context. Wherever a turn goes,
    the session is bound (dualmap.keys.sessions). Requests of no session are each a new one. Deviation: the KV does not
    follow. ``session.migration`` is EAR as DualMap has it, under any policy (dualmap.policies.migration); it goes
    before this.
    """

    name: ClassVar[str] = "ear"
    source: ClassVar[str] = "EAR (elastic affinity routing), section 4"
    summary: ClassVar[str] = "a session's host; a hot host loses sessions to the least pending prefill tokens"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the session's host, or where the session begins or moves."""
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
