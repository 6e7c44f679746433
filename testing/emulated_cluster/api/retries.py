"""What the kubelet's parts share in talking to the API server: patches and retries."""

import time
from collections.abc import Callable
from typing import Final

from dualmap_edge.kube.client import KubeError

STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"
NOT_FOUND: Final = 404
CONFLICT: Final = 409
RETRY_S: Final = 0.3
_TOO_MANY_REQUESTS: Final = 429
# What is refused on a machine that does twenty things at once; a mistake of ours is refused for longer.
_REFUSED_FOR_S: Final = 60.0


def passing(error: KubeError) -> bool:
    """Whether a request that failed so may succeed later: the server was away or busy, or somebody else wrote."""
    return error.status in {0, CONFLICT, _TOO_MANY_REQUESTS} or error.status >= 500


class Patience:
    """How long one request is sent again: while the server is away, and for a minute though it refuses.

    What it refuses because of something that is on its way (a namespace that ends, a right just bound) it will soon
    take or no longer be asked; a kubelet does not end of either. The minute is one of refusals alone: a server that
    was away between two of them may have come back as another.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` tells seconds."""
        self._clock = clock
        self._refused_since_s: float | None = None
        self._told: set[str] = set()

    def bear(self, error: KubeError) -> None:
        """Return where the request should be sent again; raises the error otherwise."""
        if passing(error):
            self._refused_since_s = None
            return
        now_s = self._clock()
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        if now_s - self._refused_since_s > _REFUSED_FOR_S:
            raise error

    def is_news(self, error: KubeError) -> bool:
        """Whether to tell of an error: a refusal, in words that have not been told of this request yet."""
        text = str(error)
        if passing(error) or text in self._told:
            return False
        self._told.add(text)
        return True
