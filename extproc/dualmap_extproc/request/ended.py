"""Ended requests that wait for their usage: the access log reports usage after the end of a response."""

from collections import OrderedDict

from dualmap.requests import Completion, Usage


class EndedRequests:
    """The last ``limit`` ended requests without a measurement of their cached tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The ended requests by request id, oldest first.
        self._ended: OrderedDict[str, tuple[str, Completion]] = OrderedDict()

    def add(self, pool: str, completion: Completion) -> None:
        """Add an ended request of a pool."""
        self._ended[completion.request_id] = (pool, completion)
        if len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def measure(self, request_id: str, usage: Usage | None) -> tuple[str, Completion] | None:
        """Return a request's pool and its completion with the cached tokens of ``usage``, and forget the request.

        Return None if the request or its usage is unknown. The cached tokens are None if ``usage`` has none.
        """
        pool, completion = self._ended.pop(request_id, ("", None))
        if completion is None or usage is None:
            return None
        return pool, completion._replace(measured_cached_tokens=usage.cached_tokens)
