"""Compares the router's number of prompt tokens with the engine's ``usage`` for every request with token ids."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from dualmap.prompts.parity import TokenClass, TokenParity
from dualmap.requests import Usage
from dualmap_edge.logs import get_logger
from dualmap_extproc.request.tokens import Tokens

# The most requests whose count waits for the engine's. Requests without usage stay until newer ones displace them.
_WAITING_MAX: Final = 16_384
_log = get_logger(__name__)


class TokenCounts:
    """The counts that wait for the engine's, and the comparisons of each pool (``dualmap.prompts.parity``)."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, tuple[str, TokenClass, int]] = OrderedDict()
        self._parities: dict[str, TokenParity] = {}

    def set_pools(self, pools: Iterable[str]) -> None:
        """Keep the comparisons of these pools only."""
        self._parities = {pool: self._parities.get(pool) or TokenParity() for pool in pools}

    def trusted_ids(self, pool: str, tokens: Tokens | None) -> "array[int] | None":
        """Return the token ids of a request; None if there are none or requests of this class are not trusted."""
        return None if tokens is None or not self.trusts(pool, tokens.requests) else tokens.ids

    def trusts(self, pool: str, requests: TokenClass) -> bool:
        """Return whether the ids of a class of a pool's requests are used."""
        parity = self._parities.get(pool)
        return parity is None or parity.trusts(requests)

    def add(self, request_id: str, pool: str, tokens: Tokens) -> None:
        """Take the count of a request that is sent to a pool. Untrusted classes count, so that they can recover."""
        self._waiting[request_id] = (pool, tokens.requests, len(tokens.ids))
        if len(self._waiting) > _WAITING_MAX:
            self._waiting.popitem(last=False)

    def compare(self, request_id: str, usage: Usage | None) -> str | None:
        """Compare a request's count with the engine's; return the pool if they differ."""
        if usage is None or not usage.prompt_tokens:
            return None
        pool, requests, own = self._waiting.pop(request_id, ("", None, 0))
        parity = self._parities.get(pool)
        if parity is None or requests is None:
            return None
        compared = parity.compare(requests, own, usage.prompt_tokens)
        if compared.changed:
            change = (
                "Token counts equal the engine's again, using token ids"
                if compared.trusted
                else "Token counts differ from the engine's, routing by bytes"
            )
            _log.warning(
                change,
                pool=pool,
                model=requests.model,
                api=requests.api.name.lower(),
                tools=requests.has_tools,
                own=own,
                engine=usage.prompt_tokens,
            )
        return None if compared.equal else pool

    def distrusted(self, pool: str) -> tuple[TokenClass, ...]:
        """Return the classes of a pool's requests whose token ids are not used."""
        parity = self._parities.get(pool)
        return () if parity is None else parity.distrusted
