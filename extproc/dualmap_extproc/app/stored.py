"""Asks the KV store of a pool about one request, for ``dualmap explain``."""

from dataclasses import dataclass
from enum import StrEnum

from dualmap.pools.pool import Pool
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt
from dualmap_extproc.request.tokens import Tokens


class StoreState(StrEnum):
    """How a question to a store went."""

    ANSWERED = "Answered"
    FAILED = "Failed"
    NOT_ASKED = "NotAsked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a pool's store said about a prompt; ``reason`` says why it said nothing.

    ``tokens`` are the prompt's tokens, and what the store holds of them; None if the ids are not known.
    """

    state: StoreState
    tokens: Tokens | None = None
    reason: str = ""

    @property
    def held_tokens(self) -> int:
        """The leading tokens of the prompt that the store holds."""
        return 0 if self.tokens is None else self.tokens.stored.tokens

    def as_json(self) -> dict[str, object]:
        """Return the values as JSON values."""
        return {"state": self.state.value, "tokens": self.held_tokens, "reason": self.reason}


async def stored_of(pool: Pool, prompt: Prompt, body: bytes, api: Api) -> Stored:
    """Return what a pool's store says about the prompt of a valid body."""
    # The tokenizer and the clients take a third of a second to import, and only pools with a store need them.
    from dualmap_extproc.kv_stores.contract import StoreError
    from dualmap_extproc.kv_stores.stores import NotAskedError, ask_once
    from dualmap_extproc.tokens.check import token_ids
    from dualmap_extproc.tokens.messages import UnsupportedRequest
    from dualmap_extproc.tokens.rendering import TokenizerError

    try:
        ids = await token_ids(pool.engine.tokenizer, body, api)
    except (UnsupportedRequest, TokenizerError) as error:
        return Stored(state=StoreState.NOT_ASKED, reason=f"the token ids are not known: {error}")
    tokens = Tokens(ids, TokenClass(prompt.model, api, prompt.has_tools))
    try:
        return Stored(state=StoreState.ANSWERED, tokens=tokens._replace(stored=await ask_once(pool, prompt, tokens)))
    except NotAskedError as error:
        return Stored(state=StoreState.NOT_ASKED, tokens=tokens, reason=str(error))
    except StoreError as error:
        return Stored(state=StoreState.FAILED, tokens=tokens, reason=str(error))
