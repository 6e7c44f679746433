"""The interface between streams and the sources of token ids (``tokens``): what a stream asks for, and what it gets."""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt


class Tokens(NamedTuple):
    """The token ids of a request, and the class of requests whose ids are right or wrong together.

    ``stored`` is what the pool's KV store holds of the prompt.
    """

    ids: "array[int]"
    requests: TokenClass
    stored: StoreMatch = NO_MATCH


TokensDone: TypeAlias = Callable[[float, Tokens | None], None]
"""Takes the time, and the tokens of a request; None if the request is routed by its bytes."""


class Pending(NamedTuple):
    """Tokens that are being computed. ``cancel`` stops waiting for them."""

    cancel: Callable[[], None]


class TokenSources(Protocol):
    """Gives the token ids of requests without holding the event loop."""

    def tokens(
        self, pool: str, prompt: Prompt, chunks: Sequence[bytes], api: Api, *, small: bool, done: TokensDone
    ) -> Tokens | Pending | None:
        """Return the tokens of a complete body that was sent to ``pool``; None if the pool or the request has none.

        For Pending, ``done`` is called once, within a deadline, unless the caller cancels before. ``small`` is true for
        a body that the event loop itself could parse.
        """
        ...
