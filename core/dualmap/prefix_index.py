"""What this router believes one instance has cached: block hashes, least recently used out first.

Blocks are stamped with a generation each time a request uses them; a generation is a sixteenth of the capacity, and
the oldest is dropped whole when the index is full. That is LRU to within a sixteenth, at one dictionary entry and one
list slot a block, with no pause longer than dropping a sixteenth. A prompt's blocks are always stamped together with
all before them, so eviction never leaves a block without its prefix (engines evict leaves first too).
"""

from collections import deque
from collections.abc import Iterable, Sequence

_GENERATIONS = 16


class PrefixIndex:
    """The blocks one instance is believed to hold, at most ``capacity_blocks`` of them."""

    def __init__(self, capacity_blocks: int) -> None:
        self._stamps: dict[int, int] = {}
        self._generations: deque[list[int]] = deque([[]])
        self._oldest = 0
        self.resize(capacity_blocks)

    def __len__(self) -> int:
        return len(self._stamps)

    def matched_blocks(self, hashes: Sequence[int]) -> int:
        """Return how many blocks from block 0 on are held without a gap."""
        held = self._stamps
        matched = 0
        for block in hashes:
            if block not in held:
                break
            matched += 1
        return matched

    def add(self, hashes: Sequence[int]) -> None:
        """Record that a prompt's blocks are (about to be) cached, as its most recent use.

        Of a prompt longer than the whole capacity only the head is recorded, as only that could be reused.
        """
        head = hashes[: self._capacity]
        # A long prompt gets a generation of its own: dropping its neighbours must not drop it with them.
        if self._generations[-1] and len(self._generations[-1]) + len(head) > 2 * self._generation_size:
            self._start_generation()
        newest = self._oldest + len(self._generations) - 1
        stamps, current = self._stamps, self._generations[-1]
        for block in head:
            if stamps.get(block) != newest:
                stamps[block] = newest
                current.append(block)
        if len(current) >= self._generation_size:
            self._start_generation()
        self._drop_excess()

    def remove(self, hashes: Iterable[int]) -> None:
        """Forget single blocks; what was cached behind them no longer matches."""
        for block in hashes:
            self._stamps.pop(block, None)

    def resize(self, capacity_blocks: int) -> None:
        """Set another capacity; what no longer fits is dropped, least recently used first."""
        self._capacity = capacity_blocks
        self._generation_size = max(1, capacity_blocks // _GENERATIONS)
        self._drop_excess()

    def clear(self) -> None:
        """Forget everything: the instance restarted, or its cache was reset."""
        self._stamps.clear()
        self._generations = deque([[]])
        self._oldest = 0

    def _start_generation(self) -> None:
        """Open a new generation; fold the two oldest into one when reuse alone has made too many of them."""
        self._generations.append([])
        if len(self._generations) > _GENERATIONS + 1:
            survivors = [block for block in self._generations.popleft() if self._stamps.get(block) == self._oldest]
            self._oldest += 1
            for block in survivors:
                self._stamps[block] = self._oldest
            self._generations[0] = survivors + self._generations[0]

    def _drop_excess(self) -> None:
        while len(self._stamps) > self._capacity:
            if len(self._generations) == 1:
                self._generations.append([])
            for block in self._generations.popleft():
                if self._stamps.get(block) == self._oldest:
                    del self._stamps[block]
            self._oldest += 1
