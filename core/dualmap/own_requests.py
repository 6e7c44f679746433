"""The requests that one of several routers received: where each is accounted for, and what their sum demands."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from dualmap.fleet.ledger import ENDED_MAX
from dualmap.requests import Completion, Decision, Outcome, PoolSnapshot, Queued, Request, SentRequest, Usage

# The weight of a request in the mean share of new prompt tokens.
_NEW_SHARE_WEIGHT: Final = 0.02


@dataclass(slots=True)
class Waiting:
    """A request without an outcome since ``since_s``, in the accounts of router ``at``, which was asked at ``asked_s``.

    ``queued`` is true after the driver has received ``Queued``.
    """

    request: Request
    at: str
    since_s: float
    asked_s: float
    queued: bool = False
    number: int = 0
    """The number of the last question about the request."""


@dataclass(slots=True)
class InFlight:
    """A request in flight, in the accounts of router ``at``, which got the last report at ``reported_s``."""

    request: Request
    at: str
    member: str
    endpoint: str
    sent_s: float
    matched_tokens: int
    predicted_ttft_s: float
    heard_s: float
    reported_s: float
    prefilled: bool = False
    fetch_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """The number of prompt tokens that the member computes."""
        new_tokens = max(0, self.request.chain.tokens - self.matched_tokens - self.fetch_tokens)
        return 0 if self.request.is_prefilled_elsewhere(new_tokens) else new_tokens

    def sent(self) -> SentRequest:
        """Return what another router needs to account for the request."""
        return SentRequest(
            request=self.request,
            endpoint=self.endpoint,
            sent_s=self.sent_s,
            matched_tokens=self.matched_tokens,
            predicted_ttft_s=self.predicted_ttft_s,
            prefilled=self.prefilled,
        )

    def completion(self, usage: Usage | None) -> Completion:
        """Return the request's end, with the engine's token counts if known."""
        return Completion(
            request_id=self.request.id,
            member=self.member,
            predicted_cached_tokens=self.matched_tokens,
            measured_cached_tokens=None if usage is None else usage.cached_tokens,
            comparable=self.request.comparable,
        )


class OwnRequests:
    """The requests that a router received and that have not ended, and where the last ended ones are accounted for."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, Waiting] = OrderedDict()
        """The requests without an outcome, the first received first."""
        self.asked: OrderedDict[str, Waiting] = OrderedDict()
        """Those of ``waiting`` whose question has no answer, the oldest question first."""
        self.in_flight: OrderedDict[str, InFlight] = OrderedDict()
        """The requests in flight; the one without a report for the longest time is first."""
        # The engine's token counts may come after a request's end.
        self._ended: OrderedDict[str, str] = OrderedDict()
        # The mean share of prompt tokens that members compute. Only the owner knows it; its answers show it.
        self._new_share = 1.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.in_flight

    def ask(self, now: float, waiting: Waiting, router: str) -> None:
        """Record that ``router`` is asked about a request, and accounts for it from now on."""
        waiting.at, waiting.asked_s = router, now
        self.waiting.setdefault(waiting.request.id, waiting)
        self.asked[waiting.request.id] = waiting
        self.asked.move_to_end(waiting.request.id)

    def drop(self, request_id: str) -> Waiting | None:
        """Forget a request without an outcome; return None if there is no such request."""
        self.asked.pop(request_id, None)
        return self.waiting.pop(request_id, None)

    def on_outcome(self, now: float, waiting: Waiting, outcome: Outcome) -> tuple[Outcome, ...]:
        """Record the outcome of a request; return the outcome for the driver, unless the driver knows it."""
        request = waiting.request
        if isinstance(outcome, Queued):
            self.asked.pop(request.id, None)
            self.waiting.setdefault(request.id, waiting)
            was_queued, waiting.queued = waiting.queued, True
            return () if was_queued else (outcome,)
        self.drop(request.id)
        if isinstance(outcome, Decision):
            receipt = outcome.receipt
            fetch_tokens = receipt.fetch_tokens or 0
            reused_tokens = receipt.matched_tokens + fetch_tokens
            new_share = 1.0 - min(1.0, reused_tokens / max(1, receipt.prompt_tokens))
            self._new_share += _NEW_SHARE_WEIGHT * (new_share - self._new_share)
            self.in_flight[request.id] = InFlight(
                request=request,
                at=waiting.at,
                member=receipt.chosen,
                endpoint=outcome.endpoints[0],
                sent_s=now,
                matched_tokens=receipt.matched_tokens,
                predicted_ttft_s=receipt.predicted_ttft_s,
                heard_s=now,
                reported_s=now,
                fetch_tokens=fetch_tokens,
            )
        return (outcome,)

    def heard(self, now: float, request_id: str) -> InFlight | None:
        """Record a report of a request; return None if the request is not in flight."""
        request = self.in_flight.get(request_id)
        if request is not None:
            request.heard_s = now
            self.in_flight.move_to_end(request_id)
        return request

    def end(self, request_id: str) -> InFlight | None:
        """End a request; return None if the request is not in flight."""
        request = self.in_flight.pop(request_id, None)
        if request is not None:
            self._ended[request_id] = request.at
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        return request

    def take_ended(self, request_id: str) -> str | None:
        """Return the router that accounts for an ended request, once; None for another request."""
        return self._ended.pop(request_id, None)

    def at(self, router: str) -> list[str]:
        """Return the requests in a router's accounts, without those whose question has no answer."""
        waiting = (each for each, request in self.waiting.items() if request.at == router and each not in self.asked)
        return [*waiting, *(each for each, request in self.in_flight.items() if request.at == router)]

    def routers(self) -> set[str]:
        """Return the routers that account for requests."""
        return {each.at for each in self.waiting.values()} | {each.at for each in self.in_flight.values()}

    def demand(self, status: PoolSnapshot, tokens_per_second: float) -> PoolSnapshot:
        """Return a snapshot with these requests only, and with the members' speed unless it is 0.

        Queued requests count as requests without a member.
        """
        requests, tokens = Counter[str](), Counter[str]()
        for each in self.in_flight.values():
            requests[each.member] += 1
            if not each.prefilled:
                tokens[each.member] += each.new_tokens
        queued = [each.request.chain.tokens for name, each in self.waiting.items() if name not in self.asked]
        return replace(
            status,
            held=len(queued),
            unplaced_prefill_tokens=round(self._new_share * sum(queued)),
            endpoints=tuple(
                replace(
                    each,
                    in_flight=requests[each.id],
                    held=0,
                    pending_prefill_tokens=tokens[each.id],
                    held_prefill_tokens=0,
                    solo_tokens_per_second=tokens_per_second or each.solo_tokens_per_second,
                )
                for each in status.endpoints
            ),
        )
