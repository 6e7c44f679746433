"""The results of a run: one record per request, and samples of the load.

``cluster`` and the oracles write the results; ``summary`` and the plots read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dualmap.requests import Reason
from dualmap_sim.arrivals import Arrival


@dataclass(slots=True, kw_only=True)
class Record:
    """One request's history. A time is None if its event did not happen; ``refused`` is None without a rejection.

    ``arrival.at_s`` is the actual arrival time, also in a closed loop. ``cached_tokens`` are the prompt tokens in the
    engine's own cache, and ``predicted_tokens`` those that the router expected there; None if the router did not hear
    of the request's end. ``pulled_tokens`` are further tokens from another engine. ``failed`` is true if the engine
    failed before or during the request. ``prefilled_s`` is the end of the prefill. ``prefilled_s`` differs from
    ``first_token_s`` only in a static prefill/decode split, where another engine returns the first token.
    ``continued`` is true if another engine got the rest of the stream (``continuations.py``). It then computed
    ``recomputed_tokens`` of the prompt and the answer again, and the stream stalled for ``stall_s``.
    """

    arrival: Arrival
    router: int
    held: bool = False
    dispatched_s: float | None = None
    endpoint: str | None = None
    rule: str | None = None
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    pulled_tokens: int = 0
    prefilled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    refused: Reason | None = None
    failed: bool = False
    continued: bool = False
    recomputed_tokens: int = 0
    stall_s: float = 0.0

    @property
    def predicted_hit(self) -> bool:
        """Whether the router expected that the engine had cached a part of the prompt."""
        return bool(self.predicted_tokens)

    @property
    def stale_hit(self) -> bool:
        """Whether the engine had cached nothing of a prompt of which the router expected a part there."""
        return self.predicted_hit and not self.cached_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival at the router to the first token; None without a first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The load of every member at one moment, by id.

    ``pending_tokens`` are prompt tokens that are neither cached nor prefilled. For a submitted request, the engine's
    cache decides which tokens count. For a queued request, the router's estimate of the cache decides.
    """

    at_s: float
    pending_tokens: Mapping[str, int]
