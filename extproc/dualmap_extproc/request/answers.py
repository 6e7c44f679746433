"""The answers to the streams of requests: from the outcomes of pools' routers, at once or when a waiting request ends.

A pool's router may queue a request, or ask the router that owns the pool. A later event, such as a first token, a new
member, a deadline or the owner's answer, decides the request. The event's outcomes then include the request, and
``release`` resumes the request's stream.
"""

from collections.abc import Mapping, Sequence

from dualmap.pools.pool import Pool
from dualmap.remote_prefills import Outcomes, RemotePrefills, Settled
from dualmap.requests import Decision, Queued, Rejection
from dualmap.shared_router import Router
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused, refused_by_router
from dualmap_extproc.names import cluster_name
from dualmap_extproc.request.observations import Arrival, ClientLimited, Enqueued, Rejected, Report, Routed
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.waiting import WaitingRequest, WaitingRequests
from dualmap_extproc.settings import Gateway

_log = get_logger(__name__)


class Answers:
    """The requests without an end, and the answers to those that wait. ``report`` receives every observation.

    ``owners`` has the router of every request without an end, by request id. ``waiting`` has those without an outcome,
    and ``prefills`` those of pools with a prefill pool.
    """

    def __init__(self, report: Report, gateway: Gateway) -> None:
        self._report = report
        self._single_destination = gateway.single_destination
        self.owners: dict[str, Router] = {}
        self.waiting = WaitingRequests()
        self.prefills = RemotePrefills()

    def answer(
        self,
        now: float,
        pool: Pool,
        outcome: Decision | Rejection,
        arrival: Arrival,
        quoted: Mapping[str, object],
        queued_s: float | None = None,
    ) -> Picked | Refused:
        """Report the outcome of a pool's router; return it as the stream's answer."""
        if isinstance(outcome, Rejection):
            self.owners.pop(outcome.request_id, None)
            if outcome.limited:
                self._report(ClientLimited(now=now, pool=pool.id))
            return self.reject(now, refused_by_router(pool.id, outcome), arrival, queued_s, outcome.request_id)
        self._report(Routed(now=now, pool=pool.id, decision=outcome, arrival=arrival, queued_s=queued_s))
        if _log.debugging:
            _log.debug("Routed", request_id=outcome.request_id, **outcome.receipt.as_json(), **quoted)
        return Picked(
            destination=self.destination(outcome.endpoints),
            cluster=cluster_name(pool.namespace, pool.name),
            max_body_bytes=pool.routing.max_body_bytes,
            request_id=outcome.request_id,
            receipt=outcome.receipt.header(pool.routing.receipt_fields) if pool.routing.receipt_header else None,
            prefillers=outcome.prefillers,
            continuing=outcome.endpoints[1:] if pool.routing.continues else (),
            # A member of the prefill pool computes the prompt, so the destination fetches nothing else.
            kv_source="" if outcome.prefillers else outcome.receipt.kv_source,
            decision=outcome,
        )

    def destination(self, endpoints: Sequence[str]) -> str:
        """Return the value of the destination header for endpoints in order of preference."""
        return endpoints[0] if self._single_destination else ",".join(endpoints)

    def reject(
        self,
        now: float,
        refused: Refused,
        arrival: Arrival | None,
        queued_s: float | None = None,
        request_id: str = "",
    ) -> Refused:
        """Report a rejection, and return it."""
        self._report(Rejected(now, refused.pool, refused, arrival, queued_s, request_id))
        return refused

    def wait(
        self, now: float, request_id: str, waiting: WaitingRequest, settled: Sequence[Settled]
    ) -> Picked | Refused | AnswerLater:
        """Keep a request until its router decides; resume the other requests that its arrival released.

        A resumed stream may end its request, which may also release the waiting request. The method then returns the
        answer to the waiting request.
        """
        self.waiting.add(request_id, waiting)
        answer = self.deliver(now, settled, arriving=request_id)
        if answer is not None:
            return answer
        self.waiting.announce()
        if waiting.since_s is not None:
            self._report_queued(now, request_id, waiting)
        return AnswerLater(request_id=request_id)

    def _report_queued(self, now: float, request_id: str, waiting: WaitingRequest) -> None:
        self._report(Enqueued(now=now, pool=waiting.router.pool.id))
        if _log.debugging:
            _log.debug("Queued", request_id=request_id, pool=waiting.router.pool.id)

    def release(self, now: float, *effects: Outcomes) -> None:
        """Resume the waiting requests that routers released or rejected."""
        # Most events release nothing.
        for _, outcomes in effects:
            if outcomes:
                self.deliver(now, self.settled(now, *effects))
                return

    def settled(self, now: float, *effects: Outcomes) -> Sequence[Settled]:
        """Return the outcomes of routers' events that are final for their requests."""
        if self.prefills.splits:
            return self.prefills.settle(now, effects)
        return [Settled(router, each) for router, outcomes in effects for each in outcomes]

    def deliver(self, now: float, settled: Sequence[Settled], *, arriving: str = "") -> Picked | Refused | None:
        """Resume the waiting requests with these outcomes.

        If the request ``arriving`` is among them, return its answer, because its stream does not wait yet. The method
        reports all outcomes of a call before it resumes the first stream.
        """
        for router, each in settled:
            waiting = self.waiting.get(each.request_id)
            if waiting is None:
                # The deadlines of all other requests must not fail with this one.
                _log.error("Ignoring the outcome of an unknown request", pool=router.pool.id)
                continue
            if isinstance(each, Queued):
                waiting.since_s = now
                self._report_queued(now, each.request_id, waiting)
                continue
            queued_s = waiting.queued_s(now)
            answer = self.answer(now, router.pool, each, waiting.arrival, waiting.quoted, queued_s)
            self.waiting.answer(each.request_id, answer)
        return self.waiting.resume(arriving)
