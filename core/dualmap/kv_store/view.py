"""What is known about the chunks in a KV store: answers of the last seconds, by key.

Answers are kept for a short time, because a store removes chunks at any time. Requests with equal prefixes then share
one question, and a late answer is of use for the next request. An old answer that a chunk is held still counts while
the store is asked again. An old answer that a chunk is missing does not: engines put the chunks of a prompt into the
store after its first request, and the session's next request needs them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

FRESH_S: Final = 1.0
"""An answer counts as new for this long; later, the store is asked again."""
STALE_S: Final = 10.0
"""An answer that a chunk is held counts for this long, if the store did not renew it."""
KEYS_MAX: Final = 65_536
"""The most chunks about which answers are kept: 16 million tokens in chunks of 256."""
HOLDERS_MAX: Final = 64
"""The most holders of a chunk that are kept."""


class StoreMatch(NamedTuple):
    """The leading tokens of a prompt that a store holds.

    ``tokens`` counts the chunks that anybody holds. ``held_at`` are the addresses of hosts that themselves hold leading
    chunks, with the tokens of these.
    """

    tokens: int
    held_at: tuple[tuple[str, int], ...] = ()


NO_MATCH: Final = StoreMatch(0)


class Chunk(NamedTuple):
    """A store's answer about one chunk. ``holders`` are addresses of hosts; a store may not name them."""

    is_held: bool
    holders: frozenset[str] = frozenset()


class _Known(NamedTuple):
    chunk: Chunk
    at_s: float


class StoreView:
    """The answers about the chunks of one store."""

    def __init__(self) -> None:
        # The oldest answer is first.
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def unknown(self, now: float, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the keys of a prompt to ask for: those without a new answer, up to the first missing chunk."""
        wanted = []
        for key in keys:
            known = self._known.get(key)
            if known is None or now - known.at_s >= FRESH_S:
                wanted.append(key)
            elif not known.chunk.is_held:
                break
        return tuple(wanted)

    def is_known(self, now: float, keys: Sequence[str]) -> bool:
        """Return whether a prompt's match needs no further answer: each chunk is held, up to a newly missing one."""
        for key in keys:
            known = self._known.get(key)
            if known is None or now - known.at_s >= STALE_S:
                return False
            if not known.chunk.is_held:
                return now - known.at_s < FRESH_S
        return True

    def put(self, now: float, keys: Collection[str], chunks: Mapping[str, Chunk]) -> None:
        """Take an answer about ``keys``. A key that is not in ``chunks`` is missing in the store."""
        for key in keys:
            chunk = chunks.get(key, _MISSING)
            if len(chunk.holders) > HOLDERS_MAX:
                chunk = Chunk(chunk.is_held, frozenset(sorted(chunk.holders)[:HOLDERS_MAX]))
            self._known.pop(key, None)
            self._known[key] = _Known(chunk, now)
        while len(self._known) > KEYS_MAX:
            del self._known[next(iter(self._known))]

    def match(self, now: float, keys: Sequence[str], chunk_tokens: int) -> StoreMatch:
        """Return what the store holds of a prompt, without gaps from its first chunk on."""
        runs: dict[str, int] = {}
        held = 0
        for key in keys:
            known = self._known.get(key)
            if known is None or not known.chunk.is_held or now - known.at_s >= STALE_S:
                break
            for holder in known.chunk.holders:
                if runs.get(holder, 0) == held:
                    runs[holder] = held + 1
            held += 1
        at = tuple(sorted((holder, blocks * chunk_tokens) for holder, blocks in runs.items()))
        return StoreMatch(held * chunk_tokens, at[:HOLDERS_MAX]) if held else NO_MATCH


_MISSING: Final = Chunk(is_held=False)
