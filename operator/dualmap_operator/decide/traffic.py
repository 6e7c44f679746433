"""Computes ``status.traffic``: SLO attainment and cache hit rate of the last 5 minutes, as short decimals.

``gather`` adds every router's totals; ``plan`` publishes the result. Pure: times are arguments from any monotonic
clock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from dualmap_operator.decide.observed import TrafficStatus

_PAUSE_S: Final = 30.0
"""Shortest time between two changes of the published values: each change is a write to the API server."""
_FEWEST: Final = 5
"""The smallest number of requests for which a value is published."""
_SLICES: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """The traffic totals that a router reports (``GET /pools/NAMESPACE/NAME``), or a difference of two totals."""

    requests: int = 0
    refused: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    measured_cached_tokens: int = 0

    def plus(self, other: "_Totals") -> "_Totals":
        return _Totals(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def since(self, earlier: "_Totals") -> "_Totals":
        """Return the increase since ``earlier``, or the full totals if the router has restarted since then."""
        added = {name: getattr(self, name) - getattr(earlier, name) for name in _NAMES}
        return self if min(added.values()) < 0 else _Totals(**added)


_NAMES: Final = tuple(field.name for field in fields(_Totals))


class TrafficWindow:
    """The traffic of one pool's routers over the last ``window_s`` seconds.

    ``published`` is the ``status.traffic`` at the start. The published values stay until new values are known, so that
    a restarted operator does not remove them.
    """

    def __init__(self, *, window_s: float = 300.0, published: TrafficStatus | None = None) -> None:
        self._window_s = window_s
        self._slices: deque[tuple[float, _Totals]] = deque()
        self._last: dict[str, tuple[float, _Totals]] = {}
        self._shown = published or TrafficStatus()
        self._began_s: float | None = None
        self._changed_s: float | None = None

    def add(self, now_s: float, router: str, totals: Mapping[str, object]) -> None:
        """Add a router's totals. A router's first totals are the baseline; invalid totals are ignored."""
        read = _read(totals)
        if read is None:
            return
        self._forget(now_s)
        last = self._last.get(router)
        self._last[router] = (now_s, read)
        if last is None:
            return
        added = read.since(last[1])
        if self._slices and now_s - self._slices[-1][0] < self._window_s / _SLICES:
            begin_s, sums = self._slices.pop()
            self._slices.append((begin_s, sums.plus(added)))
        else:
            self._slices.append((now_s, added))

    def shown(self, now_s: float) -> TrafficStatus:
        """Return the traffic to publish; it changes at most every 30 seconds."""
        if self._began_s is None or self._changed_s is None:
            self._began_s = self._changed_s = now_s
        self._forget(now_s)
        sums = _Totals()
        for _, added in self._slices:
            sums = sums.plus(added)
        present = TrafficStatus(slo_attainment=_attainment(sums), cache_hit_rate=_hit_rate(sums))
        if now_s - self._began_s < self._window_s:
            # Before the first full window, an unknown value does not replace a published value.
            present = TrafficStatus(
                slo_attainment=present.slo_attainment or self._shown.slo_attainment,
                cache_hit_rate=present.cache_hit_rate or self._shown.cache_hit_rate,
            )
        if present != self._shown and now_s - self._changed_s >= _PAUSE_S:
            self._shown, self._changed_s = present, now_s
        return self._shown

    def _forget(self, now_s: float) -> None:
        """Drop slices older than the window, and routers without totals in the window.

        The next totals of such a router are a new baseline.
        """
        oldest_s = now_s - self._window_s
        while self._slices and self._slices[0][0] < oldest_s:
            self._slices.popleft()
        self._last = {router: last for router, last in self._last.items() if last[0] >= oldest_s}


def _read(totals: Mapping[str, object]) -> _Totals | None:
    values: dict[str, int] = {}
    for name in _NAMES:
        value = totals.get(name)
        if not isinstance(value, int) or value < 0:
            return None
        values[name] = value
    return _Totals(**values)


def _attainment(sums: _Totals) -> str:
    """Return the share of requests whose first token met the SLO; rejected requests count as misses.

    Requests without streaming do not count: their first token is not observable.
    """
    asked = sums.first_tokens + sums.refused
    return _decimal(sums.slo_met, asked) if asked >= _FEWEST else ""


def _hit_rate(sums: _Totals) -> str:
    """Return the share of cached prompt tokens: measured if any engine reports cached tokens, else predicted.

    Measured and predicted tokens are never added. If engines report only some requests, the measured share is too
    small, which is the safe error for capacity planning.
    """
    if sums.requests < _FEWEST or not sums.prompt_tokens:
        return ""
    cached = sums.measured_cached_tokens or sums.predicted_cached_tokens
    # The router estimates prompt tokens, but the engine counts cached tokens exactly: the quotient may exceed 1.
    return _decimal(min(cached, sums.prompt_tokens), sums.prompt_tokens)


def _decimal(part: int, whole: int) -> str:
    return f"{part / whole:.2f}"
