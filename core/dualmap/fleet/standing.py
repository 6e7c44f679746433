"""One member's load in plain numbers: what decisions look at, so that they need not go through the books.

``ledger`` keeps one for each member up to date, ``view`` reads them.
"""

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Standing:
    """A member's load in the numbers that decisions compare, with held requests and the other replicas' shares.

    They are good before ``until_s``. T_q falls as time passes, towards ``ends_s``, but not below ``least_queue_s``:
    what waits behind the prefill at the head will take its time, however long that one has been at it. ``requests`` and
    ``placed_tokens`` are what would be in flight if nothing were held: a held request adds what it will compute.
    """

    until_s: float = -inf
    ends_s: float = -inf
    least_queue_s: float = 0.0
    linear_s: float = 0.0
    quadratic_s: float = 0.0
    pending_tokens: int = 0
    in_flight: int = 0
    requests: int = 0
    active_kv_tokens: int = 0
    placed_tokens: int = 0

    def queue_s(self, now: float) -> float:
        """Return T_q at ``now``."""
        return max(self.ends_s - now, self.least_queue_s)
