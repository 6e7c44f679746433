"""The ends of requests: at their pool's router, in the observations, and in the measurements of their usage.

The access log reports usage after the end of a response, so ended requests wait for theirs.
"""

from collections import OrderedDict
from collections.abc import Callable

from dualmap.remote_prefills import Outcomes
from dualmap.requests import Completion, Effects, Usage
from dualmap.shared_router import Router
from dualmap_extproc.request.answers import Answers
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observations import Abandoned, Ended, Measured, Report, TokensMismatched
from dualmap_extproc.request.served_pools import ServedPools
from dualmap_extproc.request.token_counts import TokenCounts
from dualmap_extproc.request.waiting import WaitingRequest


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


class Ends:
    """Ends the requests of ``answers``, and reports what their usage says.

    ``counts`` has the numbers of their prompt tokens. ``limit`` is the most ended requests that wait for their usage.
    """

    def __init__(
        self, answers: Answers, served: ServedPools, counts: TokenCounts, report: Report, *, limit: int
    ) -> None:
        self._answers = answers
        self._served = served
        self._counts = counts
        self._report = report
        self._ended = EndedRequests(limit)

    def end(
        self,
        now: float,
        request_id: str,
        end: Callable[[Router], Effects[Completion | None]],
        ending: Ending,
        waiting: WaitingRequest | None = None,
        *,
        usage: Usage | None = None,
    ) -> bool:
        """End a request at its router and report the end; return whether the request was in flight.

        A request with an outcome may be in flight before its stream is resumed.
        """
        router = self._answers.owners.get(request_id)
        if router is None:
            return False
        pool, (completion, outcomes) = router.pool.id, end(router)
        effects = [(router, outcomes)]
        if self._answers.prefills.splits:
            completion, more = self._end_prefill(now, request_id, completion, ending, usage)
            effects += more
        if completion is not None:
            self._answers.owners.pop(request_id, None)
            self._report(Ended(now=now, pool=pool, ending=ending, completion=completion))
            if completion.measured_cached_tokens is not None:
                self._report(Measured(now=now, pool=pool, completion=completion))
            elif ending is Ending.FINISHED:
                self._ended.add(pool, completion)
        elif waiting is not None:
            self._answers.owners.pop(request_id, None)
            queued_s = waiting.queued_s(now)
            self._report(
                Abandoned(now=now, pool=pool, arrival=waiting.arrival, queued_s=queued_s, request_id=request_id)
            )
        self._answers.release(now, *effects)
        return completion is not None

    def _end_prefill(
        self, now: float, request_id: str, completion: Completion | None, ending: Ending, usage: Usage | None
    ) -> tuple[Completion | None, list[Outcomes]]:
        """End a request's prefill; return the request's completion, None if it waits for a member, and the effects."""
        if completion is None or self._answers.prefills.is_waiting(request_id):
            return None, self._answers.prefills.forget(now, request_id)
        finished, failed = ending is Ending.FINISHED, ending is Ending.FAILED
        return self._answers.prefills.on_end(now, completion, usage, finished=finished, failed=failed)

    def compare(self, now: float, request_id: str, usage: Usage | None) -> None:
        """Compare the router's number of prompt tokens with the engine's, if both are known."""
        pool = self._counts.compare(request_id, usage)
        if pool is not None:
            self._report(TokensMismatched(now=now, pool=pool))

    def measure(self, now: float, request_id: str, usage: Usage | None) -> None:
        """Report the engine's measurement for a request that ended before its usage was known."""
        measured = self._ended.measure(request_id, usage)
        if usage is None or measured is None:
            return
        pool, completion = measured
        router = self._served.router(pool)
        if router is not None:
            router.on_usage(now, request_id, usage)
        if completion.measured_cached_tokens is not None:
            self._report(Measured(now=now, pool=pool, completion=completion))
