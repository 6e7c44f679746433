"""The messages between the routers of a pool: questions to its owner, the owner's answers, and reports of progress.

Messages between two routers arrive in order, or not at all. Routers share no clock, so times in messages are ages. The
receiver adds the age to its own clock; the time on the way counts as none.
"""

from dataclasses import dataclass
from enum import StrEnum

from dualmap.requests import Decision, Queued, Rejection, Request, SentRequest, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for the owner to decide, which arrived ``age_s`` ago. ``request.arrived_s`` has no meaning.

    A router may ask about a request again after it decided it by itself. The answers have the ``number`` of their
    question, so that the router ignores late answers to earlier ones.
    """

    request: Request
    age_s: float
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The owner's answer to an ``Ask``. After ``Queued``, another answer follows.

    ``tokens_per_second`` is the members' mean prefill speed that the owner has learnt, 0 if unknown.
    """

    outcome: Decision | Rejection | Queued
    tokens_per_second: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """The answer of a router that does not decide for others, because it does not serve the pool or is about to end."""

    request_id: str
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request in flight that the sender of this message decided, or that another owner decided before.

    The request arrived ``age_s`` ago, and was sent to ``endpoint`` (``ip:port``) ``sent_ago_s`` ago.
    ``matched_tokens`` and ``predicted_ttft_s`` are as in its receipt. If ``prefilled`` is true, its first token was
    observed.
    """

    request: Request
    age_s: float
    endpoint: str
    sent_ago_s: float
    matched_tokens: int
    predicted_ttft_s: float
    prefilled: bool

    @classmethod
    def of(cls, now: float, sent: SentRequest) -> "Sent":
        """Return the message about a request in flight, sent now."""
        return cls(
            request=sent.request,
            age_s=now - sent.request.arrived_s,
            endpoint=sent.endpoint,
            sent_ago_s=now - sent.sent_s,
            matched_tokens=sent.matched_tokens,
            predicted_ttft_s=sent.predicted_ttft_s,
            prefilled=sent.prefilled,
        )

    def received(self, now: float) -> SentRequest:
        """Return the request in flight by the receiver's clock, received now."""
        return SentRequest(
            request=self.request._replace(arrived_s=now - self.age_s),
            endpoint=self.endpoint,
            sent_s=now - self.sent_ago_s,
            matched_tokens=self.matched_tokens,
            predicted_ttft_s=self.predicted_ttft_s,
            prefilled=self.prefilled,
        )


class Step(StrEnum):
    """What happened to a request."""

    HEARD = "its response continues"
    FIRST_TOKEN = "its first token arrived"
    SERVED = "another endpoint served it"
    FINISHED = "its response ended"
    COUNTED = "the engine's token counts of the ended request are known"
    ABORTED = "its client disconnected, or the sender decided it without the owner"
    FAILED = "its member failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A report of a request that the receiver decided, or whose ``Sent`` it received.

    ``endpoint`` is for ``SERVED``, ``usage`` for ``FINISHED`` and ``COUNTED``.
    """

    request_id: str
    step: Step
    endpoint: str = ""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The sender's requests are now accounted for by another router; the receiver drops them."""


Message = Ask | Answer | Declined | Sent | Progress | Left
