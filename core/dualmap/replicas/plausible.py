"""Limits of the loads that another replica may report: the largest loads that a replica of this pool can cause.

Anything with access to the store may have written a report. A reported value above its limit counts as the limit.
"""

from dataclasses import dataclass

from dualmap.replicas.update import SharedLoad

IN_FLIGHT_MAX = 10_000
"""The most requests of one replica in flight at one member. Engines run some hundred requests at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """The limits of one replica's load on one member of a pool.

    ``backlog_s`` is the dispatch window and the longest prompt, because a replica sends no request to a member beyond
    the dispatch window. ``held_s`` is the longest time that a request may be queued. ``max_held`` is the largest number
    of queued requests, and ``prompt_tokens`` the length of the longest prompt.
    """

    backlog_s: float
    held_s: float
    max_held: int
    prompt_tokens: int

    def clamp(self, load: SharedLoad) -> SharedLoad:
        """Return a load within the limits."""
        in_flight = min(load.in_flight, IN_FLIGHT_MAX)
        pending = min(load.pending_prefill_tokens, (in_flight + self.max_held) * self.prompt_tokens)
        active_kv = min(load.active_kv_tokens, in_flight * self.prompt_tokens)
        backlog_s, held_s = min(load.backlog_s, self.backlog_s), min(load.held_s, self.held_s)
        if (
            pending == load.pending_prefill_tokens
            and active_kv == load.active_kv_tokens
            and in_flight == load.in_flight
            and backlog_s == load.backlog_s
            and held_s == load.held_s
        ):
            return load
        return SharedLoad(
            pending_prefill_tokens=pending,
            backlog_s=backlog_s,
            held_s=held_s,
            in_flight=in_flight,
            active_kv_tokens=active_kv,
        )
