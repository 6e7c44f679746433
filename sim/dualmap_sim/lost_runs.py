"""Detects early that a run is lost: too many of its requests can no longer meet the SLO.

``experiment`` creates the detector. ``cluster`` and the oracles call the detector at each first token and rejection.
Early detection saves most of the time of ``goodput``. The detector never ends a run that would attain the share, so it
changes no result.
"""

from collections.abc import Sequence
from typing import Final

from dualmap_sim.arrivals import Arrival
from dualmap_sim.records import Record

_ROUNDING_S: Final = 1e-6
"""Much larger than rounding errors of times, and much smaller than any duration."""


class LostRun:
    """Counts a run's requests that missed the SLO, including those that have waited longer than the SLO.

    The first ``warmup`` requests do not count. With ``in_order``, requests arrive in order at the given times. A closed
    loop has no such order, so a waiting request counts only when it is served.
    """

    def __init__(
        self, arrivals: Sequence[Arrival], *, warmup: int, slo_ttft_s: float, attainment: float, in_order: bool
    ) -> None:
        self._warmup = warmup
        self._slo_ttft_s = slo_ttft_s
        self._attainment = attainment
        self._counted = len(arrivals) - warmup
        self._missed = 0
        # Requests that have been counted as met, missed or rejected.
        self._settled: set[str] = set()
        self._waiting = arrivals[warmup:] if in_order else ()
        self._overdue = 0

    def gives_up(self, record: Record) -> bool:
        """Record a request's first token or rejection; return True if the run is lost."""
        ttft_s = record.ttft_s
        self._settle(record.arrival.request_id, missed=ttft_s is None or ttft_s > self._slo_ttft_s)
        if record.first_token_s is not None:
            self._settle_overdue(record.first_token_s)
        return (self._counted - self._missed) / self._counted < self._attainment

    def _settle_overdue(self, now: float) -> None:
        """Count the requests that have waited longer than the SLO, before their first tokens arrive."""
        latest_s = now - self._slo_ttft_s - _ROUNDING_S
        while self._overdue < len(self._waiting) and self._waiting[self._overdue].at_s < latest_s:
            self._settle(self._waiting[self._overdue].request_id, missed=True)
            self._overdue += 1

    def _settle(self, request_id: str, *, missed: bool) -> None:
        if int(request_id) >= self._warmup and request_id not in self._settled:
            self._settled.add(request_id)
            self._missed += missed
