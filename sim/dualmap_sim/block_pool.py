"""The physical KV blocks of an engine that publishes KV events, after vLLM's block pool.

Without KV events, an engine uses ``prefix_cache.py``, which is faster and has one copy of each block. This pool has the
same interface for the engine's cache, and differs as vLLM does:

- Requests in flight and cached prefixes share one memory of physical blocks. The first block is a placeholder and never
  used (vLLM's null block).
- A block keeps its contents after its request has ended, until another request needs the physical block. The least
  recently used block is first, and within a request the last block.
- Several physical blocks can have the same hash. The most frequent cause is a prompt that ends with a full block: the
  engine computes the last token again, so it stores the last block a second time.
- Each stored copy and each removed copy is an event. A reused block causes no event. A removal is published when its
  physical block is used again, not when its request ends.

The events are values of ``dualmap.engines.events``, as the router reads them from vLLM's maps. ``engine.py`` calls this
module and groups the events by engine step.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dualmap.engines.events import Cleared, Event, Removed, Stored
from dualmap.engines.token_chain import TOKEN_BYTES
from dualmap_sim.engine_requests import EngineRequest

GROUP = 0
"""The number of the only group of blocks, which has full attention."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The KV events of one engine step, which ended at ``at_s``. Numbers begin at 0 in each life of an engine."""

    number: int
    at_s: float
    events: tuple[Event, ...]


class _Holding:
    """The physical blocks of one request, in order of the request's tokens."""

    __slots__ = ("numbers", "request", "reserved", "stored")

    def __init__(self, request: EngineRequest, numbers: list[int], *, reserved: int) -> None:
        self.request = request
        self.numbers = numbers
        self.reserved = reserved
        # The leading blocks that have a hash.
        self.stored = len(numbers)


class BlockPool:
    """A memory of ``blocks`` physical blocks, of which one is the placeholder. Each engine has its own pool."""

    def __init__(self, blocks: int, *, block_tokens: int) -> None:
        assert blocks >= 2, "a pool has the placeholder and at least one block"
        self._block_tokens = block_tokens
        self._hashes: list[int | None] = [None] * blocks
        self._users = [0] * blocks
        # The blocks without a user, the next one to be used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        # The physical blocks of each hash, the first one to be reused first.
        self._copies: dict[int, list[int]] = {}
        self._holdings: dict[str, _Holding] = {}
        self._reserved = 0
        self._events: list[Event] = []
        self._removed: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self._copies

    def __len__(self) -> int:
        """Return the number of cached physical blocks, with copies."""
        return sum(map(len, self._copies.values()))

    @property
    def usable_tokens(self) -> int:
        """The number of tokens that fit into the pool."""
        return (len(self._hashes) - 1) * self._block_tokens

    @property
    def copies(self) -> dict[int, int]:
        """The number of physical blocks of each hash."""
        return {block: len(numbers) for block, numbers in self._copies.items()}

    def match(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain are cached."""
        copies = self._copies
        for index, block in enumerate(chain):
            if block not in copies:
                return index
        return len(chain)

    def admits(self, tokens: int) -> bool:
        """Return whether a further request of so many tokens fits, whatever it shares with others."""
        return self._reserved + self._blocks_for(tokens) < len(self._hashes)

    def begin(self, request: EngineRequest, *, need_tokens: int, cached_tokens: int) -> None:
        """Reserve memory for a request, and use the cached blocks of its prompt."""
        shared = [self._copies[block][0] for block in request.blocks[: cached_tokens // self._block_tokens]]
        for number in shared:
            self._free.pop(number, None)
            self._users[number] += 1
        reserved = self._blocks_for(need_tokens)
        self._reserved += reserved
        self._holdings[request.request_id] = _Holding(request, shared, reserved=reserved)

    def fill(self, request_id: str, tokens: int) -> None:
        """Compute a request's first ``tokens`` tokens; other requests can reuse the full blocks at once.

        Blocks whose hash the request does not contain take memory, but cannot be reused.
        """
        holding = self._holdings[request_id]
        numbers = holding.numbers
        while len(numbers) < self._blocks_for(tokens):
            numbers.append(self._take())
        first = holding.stored
        hashes = tuple(holding.request.blocks[first : tokens // self._block_tokens])
        if not hashes:
            return
        for number, block in zip(numbers[first:], hashes, strict=False):
            self._hashes[number] = block
            self._copies.setdefault(block, []).append(number)
        holding.stored = first + len(hashes)
        self._publish_removals()
        self._events.append(self._stored(holding.request, first, hashes))

    def end(self, request_id: str) -> None:
        """Release the blocks of a request; their contents stay until the blocks are used again."""
        holding = self._holdings.pop(request_id)
        self._reserved -= holding.reserved
        for number in reversed(holding.numbers):
            self._users[number] -= 1
            if not self._users[number]:
                self._free[number] = None

    def insert(self, chain: Sequence[int]) -> None:
        """Compute and release a prompt, as far as the pool has free blocks for it."""
        blocks = chain[: len(self._free)]
        tokens = len(blocks) * self._block_tokens
        request = EngineRequest(request_id="", prompt_tokens=tokens, output_tokens=1, blocks=blocks)
        self.begin(request, need_tokens=0, cached_tokens=self.match(blocks) * self._block_tokens)
        self.fill("", tokens)
        self.end("")

    def clear(self) -> None:
        """Forget all contents; requests in flight keep their memory."""
        self._hashes = [None] * len(self._hashes)
        self._copies.clear()
        self._publish_removals()
        self._events.append(Cleared())

    def reset(self) -> bool:
        """Forget all contents if no request is in flight; return whether the contents were forgotten."""
        if self._holdings:
            return False
        self.clear()
        return True

    def take_events(self) -> tuple[Event, ...]:
        """Return the events since the last call."""
        self._publish_removals()
        events, self._events = tuple(self._events), []
        return events

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _take(self) -> int:
        """Return the next free block, after the removal of its contents."""
        number, _ = self._free.popitem(last=False)
        self._users[number] = 1
        block = self._hashes[number]
        if block is not None:
            self._hashes[number] = None
            numbers = self._copies[block]
            numbers.remove(number)
            if not numbers:
                del self._copies[block]
            self._removed.append(block)
        return number

    def _publish_removals(self) -> None:
        if self._removed:
            self._events.append(Removed(hashes=tuple(self._removed), group=GROUP))
            self._removed.clear()

    def _stored(self, request: EngineRequest, first: int, hashes: tuple[int, ...]) -> Stored:
        """Return the event of a request's blocks from number ``first`` on."""
        size = self._block_tokens
        content = request.content
        at_start = first == 0
        return Stored(
            hashes=hashes,
            parent=None if at_start else request.blocks[first - 1],
            tokens=(
                stand_in_tokens(hashes, block_tokens=size)
                if content is None
                else content.tokens[first * size * TOKEN_BYTES : (first + len(hashes)) * size * TOKEN_BYTES]
            ),
            block_tokens=size,
            group=GROUP,
            adapter=content.adapter if content is not None else "",
            salt=content.cache_salt if content is not None and at_start else "",
            # The router cannot tell a store from the start of a prompt from a report of earlier stores.
            new=not at_start,
        )


def stand_in_tokens(blocks: Sequence[int], *, block_tokens: int) -> bytes:
    """Return packed token ids of blocks that are known only by their hashes; equal blocks have equal ids."""
    size = block_tokens * TOKEN_BYTES
    return b"".join((block.to_bytes(8, "little") * -(-size // 8))[:size] for block in blocks)
