"""A small model of an engine's block pool and of its publisher of KV events, after vLLM.

The pool keeps every copy of a block under the same hash. A copy is removed when its block is used again, and only then
is the removal published. A hit publishes nothing. The publisher keeps the last messages for a replay.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Tokens = tuple[int, ...]


@dataclass(slots=True)
class Block:
    """A physical block; ``hash`` is None if nothing is cached in it."""

    hash: int | None = None


class BlockPool:
    """One life of an engine: ``usable`` physical blocks of ``block_tokens`` tokens."""

    def __init__(self, *, usable: int, block_tokens: int, seed: int = 0, as_maps: bool = False) -> None:
        self.block_tokens = block_tokens
        self.events: list[object] = []
        self._seed = seed
        self._as_maps = as_maps
        # Free blocks, the least recently used first. Cached contents stay until the block is used again.
        self._free: OrderedDict[int, Block] = OrderedDict((n, Block()) for n in range(usable))
        self._cached: dict[int, list[int]] = {}

    @property
    def copies(self) -> dict[int, int]:
        """The number of copies of each cached block."""
        return {block: len(numbers) for block, numbers in self._cached.items() if numbers}

    def cached_tokens(self, tokens: Tokens, salt: str = "") -> int:
        """Return how many tokens of a prompt a request would reuse."""
        return len(self._hit(self._hashes(tokens, salt), tokens)) * self.block_tokens

    def serve(self, *prompts: Tokens, salt: str = "", report: bool = False) -> None:
        """Compute prompts in the same step, so that equal prompts make copies."""
        used: list[tuple[int, Block]] = []
        hits = [self._hit(self._hashes(tokens, salt), tokens) for tokens in prompts]
        held = [[self._take(self._cached[block][0], used) for block in hit] for hit in hits]
        for tokens, hit, blocks in zip(prompts, hits, held, strict=True):
            hashes = self._hashes(tokens, salt)
            if report and hit:
                self._store(hashes[: len(hit)], None, tokens[: len(hit) * self.block_tokens], salt)
            fresh = hashes[len(hit) :]
            if len(fresh) > len(self._free):
                continue
            for block in fresh:
                number = next(iter(self._free))
                self._evict(number)
                blocks.append(number)
                taken = self._free.pop(number)
                taken.hash = block
                used.append((number, taken))
                self._cached.setdefault(block, []).append(number)
            if fresh:
                parent = hashes[len(hit) - 1] if hit else None
                rest = tokens[len(hit) * self.block_tokens : len(hashes) * self.block_tokens]
                self._store(fresh, parent, rest, salt)
        contents = dict(used)
        for blocks in held:
            # The last block of a prompt is used again first.
            for number in reversed(blocks):
                if number in contents:
                    self._free[number] = contents.pop(number)

    def clear(self) -> None:
        """Forget all cached blocks."""
        self._cached.clear()
        for block in self._free.values():
            block.hash = None
        self.events.append({"type": "AllBlocksCleared"} if self._as_maps else ["AllBlocksCleared"])

    def _hashes(self, tokens: Tokens, salt: str) -> list[int]:
        link, hashes = f"{self._seed}/{salt}".encode(), []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            link = hashlib.sha256(link + repr(tokens[start : start + self.block_tokens]).encode()).digest()
            hashes.append(int.from_bytes(link[-8:], "big"))
        return hashes

    def _hit(self, hashes: Sequence[int], tokens: Tokens) -> list[int]:
        """Return the reused blocks. The last token of a prompt is always computed."""
        hit = []
        for block in hashes[: (len(tokens) - 1) // self.block_tokens]:
            if not self._cached.get(block):
                break
            hit.append(block)
        return hit

    def _take(self, number: int, used: list[tuple[int, Block]]) -> int:
        if number in self._free:
            used.append((number, self._free.pop(number)))
        return number

    def _evict(self, number: int) -> None:
        block = self._free[number].hash
        if block is None:
            return
        self._cached[block].remove(number)
        self.events.append(
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
            if self._as_maps
            else ["BlockRemoved", [block], "GPU", 0]
        )

    def _store(self, hashes: Sequence[int], parent: int | None, tokens: Tokens, salt: str) -> None:
        keys: list[object] = [None] * len(hashes)
        if salt and parent is None:
            keys[0] = [salt]
        fields = ["BlockStored", list(hashes), parent, list(tokens), self.block_tokens, None, "GPU", None, keys, 0]
        names = (
            *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
            *("extra_keys", "group_idx"),
        )
        self.events.append(dict(zip(names, fields, strict=True)) if self._as_maps else fields)


class Publisher:
    """Numbers the messages of an engine's lives, and keeps the last ``kept`` messages of a life for replays."""

    def __init__(self, kept: int) -> None:
        self.next_number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)

    def publish(self, pool: BlockPool) -> tuple[int, bytes] | None:
        """Return the message of a step, None if nothing happened in it."""
        if not pool.events:
            return None
        message = (self.next_number, msgspec.msgpack.encode([1.5, pool.events, 0]))
        pool.events = []
        self.next_number += 1
        self._kept.append(message)
        return message

    def restart(self) -> None:
        """Begin another life."""
        self.next_number = 0
        self._kept.clear()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Return the kept messages from a number on."""
        return [message for message in self._kept if message[0] >= start]
