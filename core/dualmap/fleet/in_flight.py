"""A request that was sent to a member and has not ended."""

from dataclasses import dataclass
from enum import Enum

from dualmap.fleet.estimate import AwaitedAnswer, Lesson
from dualmap.fleet.usage import Prediction
from dualmap.prompts.blocks import BlockChain
from dualmap.requests import Completion, Usage


class Stage(Enum):
    """The assumed state of a request at its member."""

    PENDING = "its prefill has not ended"
    DECODING = "its answer is generated"
    SILENT = "nothing: no report of it came for so long that its end must have been missed"


@dataclass(slots=True)
class InFlightRequest:
    """A request in flight.

    ``compute_s`` is the expected time to compute the uncached tokens of the prompt. The router observes the end of a
    prefill only if the response is ``streamed``; otherwise it assumes that the prefill ends at the expected time.
    ``prefilled`` is true after the observed or assumed end of the prefill. A request without reports may reach a later
    ``stage`` while ``prefilled`` is false. ``silent_since_s`` is the time of the last report, or of the start of
    decoding. ``alone`` is true if no others had prefills at the member when this request was dispatched. The
    engine runs the request as ``sequences`` requests. If ``prefilled_elsewhere``, a member of another pool computes the
    prompt, so the request has no pending prefill here. ``lesson`` is what the prefill changed in the member's learnt
    speed; None if nothing. The engine's token counts are compared with ``prediction`` after the request's end. The
    pool's KV store holds the leading ``stored_tokens``; of these, the member is expected to fetch ``fetch_tokens``,
    whose time is part of ``compute_s``. ``answers_since_s`` is the time of the first token, or before it of the
    dispatch. ``answer`` is not None while the duration of the whole answer will teach the member's speed.
    """

    request_id: str
    member: str
    chain: BlockChain
    matched_tokens: int
    prediction: Prediction
    arrived_s: float
    dispatched_s: float
    predicted_ttft_s: float
    compute_s: float
    heard_s: float
    streamed: bool = True
    prefilled: bool = False
    stage: Stage = Stage.PENDING
    silent_since_s: float = 0.0
    alone: bool = True
    session: int | None = None
    client: int = 0
    sequences: int = 1
    prefilled_elsewhere: bool = False
    lesson: Lesson | None = None
    stored_tokens: int = 0
    fetch_tokens: int = 0
    answers_since_s: float = 0.0
    answer: AwaitedAnswer | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the duration of the whole answer shows how slow its member is.

        It does not if prefills of other routers, other sequences or fetched tokens are part of the duration.
        """
        return (
            not self.streamed
            and self.alone
            and self.sequences == 1
            and not self.prefilled_elsewhere
            and self.stored_tokens <= self.matched_tokens
        )

    @property
    def new_tokens(self) -> int:
        """The number of prompt tokens that the member must compute."""
        return self.chain.tokens - self.matched_tokens - self.fetch_tokens

    def completion(self, usage: Usage | None) -> Completion:
        """Return the completion for the request's end, with the engine's token counts if known."""
        return Completion(
            request_id=self.request_id,
            member=self.member,
            predicted_cached_tokens=self.matched_tokens,
            measured_cached_tokens=None if usage is None else usage.cached_tokens,
            comparable=self.prediction.origin.comparable,
        )
