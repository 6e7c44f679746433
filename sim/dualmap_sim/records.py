"""The results of a run: one record per request, and samples of the load.

``cluster`` and the oracles write these, ``summary`` and the plots read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dualmap.requests import Reason
from dualmap_sim.arrivals import Arrival


@dataclass(slots=True, kw_only=True)
class Record:
    """One request's way. Times are None, and ``refused`` is, where that never happened.

    ``arrival.at_s`` is when it really arrived, also in a closed loop. ``cached_tokens`` of the prompt its engine had,
    ``pulled_tokens`` beyond them came from another. ``failed`` says that its engine died or was dead, whatever it had
    answered until then.
    """

    arrival: Arrival
    router: int
    held: bool = False
    dispatched_s: float | None = None
    endpoint: str | None = None
    rule: str | None = None
    cached_tokens: int = 0
    pulled_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    refused: Reason | None = None
    failed: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival at the router to the first token; None when there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The load of every member at one moment, by id.

    ``pending_tokens`` are prompt tokens still to be computed and not yet prefilled: of requests handed over what their
    engine's cache lacked at that moment, of those held for the member what their router expects it to lack.
    """

    at_s: float
    pending_tokens: Mapping[str, int]
