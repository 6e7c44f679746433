"""Sums a pool's demand over its routers: an autoscaler reads one number per pool.

Each router computes its own share (``dualmap.scaling.scaling``) and reports it to the other routers once a second.
``PeerShares`` stores and sums the reports; the driver transports them. Times are monotonic seconds, as in the router.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.requests import PoolSnapshot
from dualmap.scaling.scaling import WINDOW_S, FirstTokens, OtherRouter, Scaling, waiting_tokens

REMEMBERED_S = WINDOW_S
"""The time for which a silent router's last report counts.

After this time, the other routers have measured the silent router's traffic, which moved to them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One router's share of a pool's demand, or a sum of shares.

    ``pending_prefill_tokens`` includes the tokens of queued requests. ``first_tokens`` counts the first tokens in the
    last WINDOW_S seconds; ``slo_met`` counts those within the SLO time. The sum of ``desired_replicas`` must be rounded
    up.
    """

    desired_replicas: float = 0.0
    pending_prefill_tokens: int = 0
    in_flight: int = 0
    held: int = 0
    first_tokens: int = 0
    slo_met: int = 0

    @property
    def active(self) -> bool:
        """True if any request is in flight, is queued, or arrived within WINDOW_S, so that a member is needed."""
        return self.desired_replicas > 0.0

    @property
    def slo_attainment(self) -> float:
        """The share of first tokens within the SLO; 1 without first tokens."""
        return self.slo_met / self.first_tokens if self.first_tokens else 1.0


NO_SHARE = Share()


def share_of(now: float, scaling: Scaling, status: PoolSnapshot, *, others: Sequence[OtherRouter] | None = ()) -> Share:
    """Return this router's own share from a present snapshot; ``others`` as in ``Scaling.signals``."""
    first_tokens = scaling.window.first_tokens(now)
    return Share(
        desired_replicas=scaling.signals(now, status, others=others).desired_replicas,
        pending_prefill_tokens=waiting_tokens(status),
        in_flight=sum(each.in_flight for each in status.endpoints),
        held=status.held,
        first_tokens=first_tokens.count,
        slo_met=first_tokens.slo_met,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A router's report to other routers: its ``own`` share, and the sum of all shares in this router (``pool``)."""

    own: Share
    pool: Share


class PeerShares:
    """The reports of the other routers of one pool.

    If a router stops reporting, its share leaves the sum at once. The traffic of the stopped router appears in the
    other routers' windows only over the next minute. For REMEMBERED_S, the total is therefore at least the last sum
    that the silent router reported. A restart or crash of a router thus does not scale the pool down.
    """

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Report]] = {}
        self._alive: dict[str, float] = {}

    def note_alive(self, reported_s: float, peer: str) -> None:
        """Record that a router was running at ``reported_s``, even if it reports no shares (as older versions do)."""
        self._alive[peer] = max(reported_s, self._alive.get(peer, reported_s))

    def add_report(self, reported_s: float, peer: str, report: Report) -> None:
        """Store a router's report as of ``reported_s``."""
        known = self._reports.get(peer)
        if known is None or known[0] <= reported_s:
            self._reports[peer] = reported_s, report

    def expire(self, now: float) -> None:
        """Remove expired reports."""
        self._reports = {peer: each for peer, each in self._reports.items() if each[0] + REMEMBERED_S > now}
        self._alive = {peer: reported_s for peer, reported_s in self._alive.items() if reported_s + PEER_TTL_S > now}

    def incomplete(self, now: float) -> bool:
        """Return whether the sum is incomplete: a running router has not reported its share."""
        return any(
            reported_s + PEER_TTL_S > now and peer not in self._reports for peer, reported_s in self._alive.items()
        )

    def others(self, now: float) -> tuple[OtherRouter, ...] | None:
        """Return the reports of the other routers; None if any known router has no recent report."""
        if self.incomplete(now) or any(reported_s + PEER_TTL_S <= now for reported_s, _ in self._reports.values()):
            return None
        return tuple(
            OtherRouter(
                desired_replicas=own.desired_replicas,
                first_tokens=FirstTokens(count=own.first_tokens, slo_met=own.slo_met),
            )
            for own in (report.own for _, report in self._reports.values())
        )

    def live(self, now: float, own: Share) -> Share:
        """Return the sum of ``own`` and the shares of all running routers."""
        reported = [report.own for reported_s, report in self._reports.values() if reported_s + PEER_TTL_S > now]
        return _sum((own, *reported)) if reported else own

    def total(self, now: float, own: Share) -> Share:
        """Return the sum, at least the last sum of each router that stopped reporting within REMEMBERED_S."""
        live = self.live(now, own)
        silent = [
            report.pool
            for reported_s, report in self._reports.values()
            if reported_s + PEER_TTL_S <= now < reported_s + REMEMBERED_S
        ]
        if not silent:
            return live
        sums = (live, *silent)
        return Share(
            desired_replicas=max(each.desired_replicas for each in sums),
            pending_prefill_tokens=max(each.pending_prefill_tokens for each in sums),
            in_flight=max(each.in_flight for each in sums),
            held=max(each.held for each in sums),
            first_tokens=live.first_tokens,
            slo_met=live.slo_met,
        )


def _sum(shares: Iterable[Share]) -> Share:
    shares = tuple(shares)
    return Share(
        desired_replicas=sum(each.desired_replicas for each in shares),
        pending_prefill_tokens=sum(each.pending_prefill_tokens for each in shares),
        in_flight=sum(each.in_flight for each in shares),
        held=sum(each.held for each in shares),
        first_tokens=sum(each.first_tokens for each in shares),
        slo_met=sum(each.slo_met for each in shares),
    )
