"""Detects early that a run is lost: too many of its requests can no longer meet the SLO.

Neighbours: ``experiment`` sets it up, ``cluster`` and the oracles ask it at each first token and refusal, ``goodput``
saves most of its time by it. It never ends a run that would have succeeded, and so changes no result.
"""

from collections.abc import Sequence
from typing import Final

from dualmap_sim.arrivals import Arrival
from dualmap_sim.records import Record

_ROUNDING_S: Final = 1e-6
"""Far more than the error of adding times, far less than anything that takes time."""


class LostRun:
    """Counts a run's requests that missed the SLO, those that wait beyond it still unserved included.

    The first ``warmup`` requests do not count. ``in_order`` says that the requests arrive at the times that their
    arrivals state, in order; in a closed loop they do not, and one that waits is counted only when it is served.
    """

    def __init__(
        self, arrivals: Sequence[Arrival], *, warmup: int, slo_ttft_s: float, attainment: float, in_order: bool
    ) -> None:
        self._warmup = warmup
        self._slo_ttft_s = slo_ttft_s
        self._attainment = attainment
        self._counted = len(arrivals) - warmup
        self._missed = 0
        # Requests whose fate has been counted: met, missed or refused.
        self._settled: set[str] = set()
        self._waiting = arrivals[warmup:] if in_order else ()
        self._overdue = 0

    def gives_up(self, record: Record) -> bool:
        """Take note of a request that got its first token or was refused; True when the run is lost."""
        ttft_s = record.ttft_s
        self._settle(record.arrival.request_id, missed=ttft_s is None or ttft_s > self._slo_ttft_s)
        if record.first_token_s is not None:
            self._settle_overdue(record.first_token_s)
        return (self._counted - self._missed) / self._counted < self._attainment

    def _settle_overdue(self, now: float) -> None:
        """Count those that should have had their first token by now, whenever they will get it."""
        latest_s = now - self._slo_ttft_s - _ROUNDING_S
        while self._overdue < len(self._waiting) and self._waiting[self._overdue].at_s < latest_s:
            self._settle(self._waiting[self._overdue].request_id, missed=True)
            self._overdue += 1

    def _settle(self, request_id: str, *, missed: bool) -> None:
        if int(request_id) >= self._warmup and request_id not in self._settled:
            self._settled.add(request_id)
            self._missed += missed
