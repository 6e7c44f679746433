"""A request that was handed over to its instance and has not ended: a line in the books of ``ledger``."""

from dataclasses import dataclass
from enum import Enum

from dualmap.prompts.blocks import BlockChain
from dualmap.requests import Completion, Usage


class Stage(Enum):
    """What an instance is believed to do with a request."""

    PENDING = "its prefill has not ended"
    DECODING = "its answer is generated"
    SILENT = "nothing, since nothing was heard of it for long: its end must have been missed"


@dataclass(slots=True)
class Entry:
    """One live request.

    ``compute_s`` is what computing the uncached part of its prompt was expected to take. The end of a prefill is seen
    only when the answer is ``streamed``; otherwise it is taken to end when it should. ``prefilled`` says that it was
    seen to end, or taken to by that rule; one of which nothing was heard may be believed to be past it all the same
    (``stage``). ``silent_since_s`` is when it was last heard of, or began to be decoded. ``alone`` says that no other
    replica had prefills at the instance when this one was handed over.
    """

    request_id: str
    member: str
    chain: BlockChain
    matched_tokens: int
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

    @property
    def new_tokens(self) -> int:
        """Prompt tokens the instance has to compute."""
        return self.chain.tokens - self.matched_tokens

    def completion(self, usage: Usage | None) -> Completion:
        """Return what is told of the request when its books are closed, with the engine's counts where known."""
        return Completion(
            request_id=self.request_id,
            member=self.member,
            predicted_cached_tokens=self.matched_tokens,
            measured_cached_tokens=None if usage is None else usage.cached_tokens,
        )
