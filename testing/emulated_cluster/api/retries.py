"""Retries of API server requests: the temporary errors, and the time limit; also the content types of patches."""

import time
from collections.abc import Callable
from typing import Final

from emulated_cluster.api.client import ApiError

STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"
NOT_FOUND: Final = 404
CONFLICT: Final = 409
RETRY_S: Final = 0.3
_TOO_MANY_REQUESTS: Final = 429
# On a busy machine, a new role binding or namespace becomes effective in less time. The API server rejects an invalid
# request for longer.
_REJECTED_FOR_S: Final = 60.0


def is_temporary(error: ApiError) -> bool:
    """Whether a retry may succeed: the server was down or busy, or another client wrote the object."""
    return error.status in {0, CONFLICT, _TOO_MANY_REQUESTS} or error.status >= 500


class Retries:
    """Repeats one request while the server is down, and for a minute while the server rejects it.

    Some rejections are temporary: a namespace that is being deleted, a role that was bound just now. An outage between
    two rejections restarts the minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is monotonic, in seconds."""
        self._clock = clock
        self._rejected_since_s: float | None = None
        self._logged: set[str] = set()

    def check(self, error: ApiError) -> None:
        """Return if the caller should repeat the request; raise the error otherwise."""
        if is_temporary(error):
            self._rejected_since_s = None
            return
        now_s = self._clock()
        if self._rejected_since_s is None:
            self._rejected_since_s = now_s
        if now_s - self._rejected_since_s > _REJECTED_FOR_S:
            raise error

    def should_log(self, error: ApiError) -> bool:
        """Whether the error is a rejection with a text that is not logged for this request yet."""
        text = str(error)
        if is_temporary(error) or text in self._logged:
            return False
        self._logged.add(text)
        return True
