"""Prompts that were placed at a member lately, whose blocks the member's engine may not have reported yet.

An engine reports blocks after it has computed them. Until then, a claim lets equal prompts go to the same member. A
claim ends when the engine reports the prompt's last block. It also ends soon after the expected first token, because
the engine may never compute the prompt.

The blocks of a prompt are the keys of its token ids. For a prompt without known token ids, such as one that another
router placed, they are the hashes of its text. Keys of the two kinds are never in the same ``Claims``.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Final

CLAIM_S: Final = 5.0
"""A claim lasts for this time after the expected first token."""
CLAIM_MAX_S: Final = 60.0
"""The longest claim."""
CLAIMED_BLOCKS_MAX: Final = 65536
"""The most blocks of one member's claims; above, the oldest claims end."""


class Claims:
    """The claims of one member, by request id. ``keys`` are always those of a prompt's blocks from block 0 on."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[float, tuple[int, ...]]] = {}
        self._ends_s: list[tuple[float, str]] = []
        # The number of claims of each block.
        self._blocks: Counter[int] = Counter()
        # The requests of each prompt, by the prompt's last block.
        self._last: dict[int, set[str]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._size = 0

    @property
    def awaited(self) -> Mapping[int, tuple[int, ...]]:
        """The blocks of the claimed prompts by their last block, which change with the claims."""
        return self._prompts

    def add(self, now: float, request_id: str, keys: tuple[int, ...], *, expected_s: float) -> None:
        """Claim a request's prompt, whose first token is expected in ``expected_s`` seconds; extend a known claim."""
        self._expire(now)
        if not keys or len(keys) > CLAIMED_BLOCKS_MAX:
            return
        ends_s = now + min(expected_s + CLAIM_S, CLAIM_MAX_S)
        if request_id not in self._claims:
            while self._size + len(keys) > CLAIMED_BLOCKS_MAX:
                self.withdraw(next(iter(self._claims)))
            self._blocks.update(keys)
            self._size += len(keys)
            self._last.setdefault(keys[-1], set()).add(request_id)
            self._prompts[keys[-1]] = keys
        self._claims[request_id] = (ends_s, keys)
        heappush(self._ends_s, (ends_s, request_id))

    def withdraw(self, request_id: str) -> None:
        """End a request's claim; ignore an unknown request."""
        _, keys = self._claims.pop(request_id, (0.0, ()))
        self._size -= len(keys)
        if keys:
            requests = self._last[keys[-1]]
            requests.discard(request_id)
            if not requests:
                del self._last[keys[-1]], self._prompts[keys[-1]]
        for key in keys:
            count = self._blocks[key]
            if count > 1:
                self._blocks[key] = count - 1
            else:
                # Counter's own deletion is slower.
                self._blocks.pop(key)

    def on_reported(self, key: int) -> None:
        """End the claims of the prompts whose last block the engine has reported."""
        for request_id in list(self._last.get(key, ())):
            self.withdraw(request_id)

    def leading_blocks(self, now: float, keys: tuple[int, ...]) -> int:
        """Return the number of leading blocks of a prompt that are claimed."""
        self._expire(now)
        # A claim with a block contains all blocks before it, so the claimed blocks of a prompt are its first ones.
        low, high = 0, len(keys) if self._blocks else 0
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """End all claims."""
        self._claims.clear()
        self._ends_s.clear()
        self._blocks.clear()
        self._last.clear()
        self._prompts.clear()
        self._size = 0

    def _expire(self, now: float) -> None:
        while self._ends_s and self._ends_s[0][0] <= now:
            ends_s, request_id = heappop(self._ends_s)
            if request_id in self._claims and self._claims[request_id][0] == ends_s:
                self.withdraw(request_id)
