"""The tier between cached and computed tokens: tokens that a member fetches from the pool's KV store.

A prefill of a prompt then takes the time of the fetch and the time to compute the tokens behind it. A fetch counts only
if it is faster than computing the same tokens. The speed of fetches is learnt for the whole pool, because its members
share the store and its network: from the first tokens of requests for which the fetch is the larger part of the
prefill. A store that does not hold what it says makes fetches look as slow as computing, so it soon has no effect.
"""

from typing import Final, NamedTuple

from dualmap.fleet.estimate import Speed
from dualmap.fleet.samples import RecentSamples

SPEED_BOUND: Final = 100.0
"""The learnt speed is at most this factor above or below the pool's first guess."""
SHORTEST_FETCH_TOKENS: Final = 256
"""Shorter fetches do not show the speed, because scheduling and network take most of their time."""
# The median is taken over this many fetches. One client provides at most _MOST_OF_CLIENT while others have some.
_WINDOW: Final = 15
_MOST_OF_CLIENT: Final = 7
_PRIOR_FETCHES: Final = 4


class Prefill(NamedTuple):
    """The expected prefill of a prompt: the tokens that its member fetches, and the seconds with the fetch."""

    fetch_tokens: int
    seconds: float


class StoreTier(NamedTuple):
    """What a store holds of one prompt: its leading ``tokens``, each of which takes ``token_s`` to fetch.

    ``held_at`` are the leading tokens that hosts themselves hold, by address.
    """

    tokens: int
    token_s: float
    held_at: tuple[tuple[str, int], ...] = ()

    def prefill(self, speed: Speed, prompt_tokens: int, matched_tokens: int) -> Prefill:
        """Return the prefill at a member that caches ``matched_tokens``."""
        computed_s = speed.compute_s(prompt_tokens - matched_tokens, matched_tokens)
        fetch_tokens = self.tokens - matched_tokens
        if fetch_tokens <= 0:
            return Prefill(0, computed_s)
        fetched_s = fetch_tokens * self.token_s + speed.compute_s(prompt_tokens - self.tokens, self.tokens)
        return Prefill(fetch_tokens, fetched_s) if fetched_s < computed_s else Prefill(0, computed_s)


class FetchSpeed:
    """The speed with which the members of a pool fetch tokens from its store."""

    def __init__(self, prior_tokens_per_second: float) -> None:
        self._prior_s = 1.0 / prior_tokens_per_second
        self._samples = self._no_samples()

    @property
    def token_s(self) -> float:
        """The seconds to fetch a token: the median of the recent fetches."""
        return self._samples.median

    def observe(self, now: float, client: int, *, tokens: int, seconds: float) -> None:
        """Learn from a client's fetch of ``tokens`` that took ``seconds``."""
        if tokens >= SHORTEST_FETCH_TOKENS:
            low_s, high_s = self._prior_s / SPEED_BOUND, self._prior_s * SPEED_BOUND
            self._samples.add(now, client, min(max(seconds / tokens, low_s), high_s))

    def set_prior(self, tokens_per_second: float) -> None:
        """Set another first guess; a changed one resets the learnt speed."""
        if self._prior_s != 1.0 / tokens_per_second:
            self._prior_s = 1.0 / tokens_per_second
            self._samples = self._no_samples()

    def _no_samples(self) -> RecentSamples:
        return RecentSamples(window=_WINDOW, most=_MOST_OF_CLIENT, prior=self._prior_s, priors=_PRIOR_FETCHES)
