"""When a member takes another request: its backlog is within the dispatch window, and the prompt fits into its memory.

A request that has waited for long may use this router's share of a member, whatever other routers report.
"""

from dualmap.engines.profiles import Profiles
from dualmap.fleet.ledger import Ledger
from dualmap.pools.pool import Pool
from dualmap.queue.fair_shares import FairShares
from dualmap.queue.request_queue import MemberQueue

# The initial estimate of a request's mean output tokens, and the weight of each completed request in that mean.
_OUTPUT_TOKENS = 200.0
_OUTPUT_WEIGHT = 0.02
# The memory reserved for outputs is this factor times their mean, because the sum of outputs varies. The value is from
# exploratory simulations without recorded results.
_OUTPUT_MARGIN = 1.5
# The part of the dispatch window in use while clients contest their shares. Exploratory simulations, which are not
# recorded, led to the value: a smaller part would leave engines idle between requests.
_CONTESTED_WINDOW = 0.25
# A request that has waited for this part of its SLO (or of the longest wait) may use this router's share of a member.
_SHARE_AFTER = 0.5
# A tolerance for floating-point errors: at the time that next_dispatch_s returns, the backlog equals the window.
_WINDOW_SLACK_S = 1e-6


class Capacity:
    """The backlog and the free memory of a pool's members. ``ledger`` and ``profiles`` are of the same pool."""

    def __init__(self, pool: Pool, *, ledger: Ledger, profiles: Profiles, shares: FairShares) -> None:
        self._ledger = ledger
        self._profiles = profiles
        self._shares = shares
        self._output_tokens = _OUTPUT_TOKENS
        self.adopt(pool)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool."""
        self._window_s = pool.routing.queue.dispatch_window_s
        self._share_after_s = _SHARE_AFTER * min(pool.slo.ttft_s, pool.routing.queue.max_wait_s)
        self._stall_s = pool.routing.rebalance.decode_stall_s

    @property
    def reserved_output_tokens(self) -> float:
        """The KV tokens that are reserved for the output of each request."""
        return _OUTPUT_MARGIN * self._output_tokens

    def backlog_s(self, now: float, member: str) -> float:
        """Return the seconds of prefill that were sent to a member and have no observed end."""
        load = self._ledger.loads[member]
        load.end_overdue(now)
        return load.backlog_s(now, self._stall_s)

    def queue_s(self, now: float, member: str) -> float:
        """Return a member's T_q (paper eq. 7): the time until a new request's prefill would start there.

        A new request goes before the late requests, which are deferred.
        """
        return self._ledger.loads[member].queue_s(now, self._stall_s)

    def ends_s(self, now: float, member: str) -> float:
        """Return the seconds until all prefills that are now pending or queued at a member have ended."""
        return self._ledger.loads[member].ends_s(now, self._stall_s)

    def is_open(self, now: float, member: str, *, waited_s: float) -> bool:
        """Whether a member's backlog leaves a place for a request that has waited for ``waited_s``."""
        window_s = self._open_window_s(now) + _WINDOW_SLACK_S
        if self.backlog_s(now, member) <= window_s:
            return True
        return self._may_use_share(waited_s) and self._ledger.loads[member].within_share(now, self._stall_s, window_s)

    def has_room(self, member: str, prompt_tokens: int, *, waited_s: float) -> bool:
        """Whether a prompt fits into a member's KV memory now; True if the memory's size is unknown."""
        kv_tokens, output_tokens = self._profiles.kv_tokens(member), self.reserved_output_tokens
        if kv_tokens is None:
            return True
        load = self._ledger.loads[member]
        if load.has_room(prompt_tokens, kv_tokens, output_tokens=output_tokens):
            return True
        return self._may_use_share(waited_s) and load.has_room_in_share(
            prompt_tokens, kv_tokens, output_tokens=output_tokens
        )

    def queue(self, member: str) -> MemberQueue:
        """Return the queue of a member."""
        return self._ledger.loads[member].queue

    def next_dispatch_s(self, *, after_s: float) -> float | None:
        """Return the first dispatch time after ``after_s`` without an event; None if a dispatch needs an event."""
        window_s = self._open_window_s(after_s)
        return self._ledger.dispatch_times.first_s(window_s, after_s=after_s, share_after_s=self._share_after_s)

    def on_output(self, tokens: int) -> None:
        """Count the output of a completed request in the mean output."""
        self._output_tokens += _OUTPUT_WEIGHT * (tokens - self._output_tokens)

    def _open_window_s(self, now: float) -> float:
        """Return the dispatch window: a member takes requests while its backlog is within it."""
        return self._window_s * _CONTESTED_WINDOW if self._shares.is_contested(now) else self._window_s

    def _may_use_share(self, waited_s: float) -> bool:
        return waited_s + _WINDOW_SLACK_S >= self._share_after_s
