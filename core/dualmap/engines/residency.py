"""What one member holds, according to the events of its engine.

The engine names each block with a hash. A table maps the hash to the block's link in the router's own chain over token
ids (``dualmap.engines.token_chain``). The rules:

- An engine can have several copies of a block under one hash, and reports each copy and each removal. The table counts
  copies by rank and group of the member, up to eight. A block without copies is forgotten, and the removal of an
  unknown block is ignored.
- Only blocks in the engine's own GPU memory count, and only blocks of groups in which every block of a prompt stays
  (full attention). Blocks of a sliding window have no positions.
- An engine may report old blocks again. Such a report looks like a store from the start of a prompt, all of whose
  blocks are known, or were forgotten while the engine may have had another copy. It counts no copies. Otherwise, the
  table would keep blocks that the engine does not have, and requests would go there. If the blocks were copies after
  all, the router forgets a block too early, and with it the prompts that begin with it.
- A store from the start of a prompt with any other block is new, so its known blocks are copies: the engine computed
  two requests with a common beginning at the same time.
- If the router may have forgotten a block too early, it holds the block again when the engine shows that it has it. A
  store names the block as its parent, or the engine has stored the last block of a prompt that was sent to it
  (``awaited``). The engine then has all blocks before.
- A store whose parent is unknown waits within a bound (``dualmap.engines.parked_stores``). Its blocks are never placed
  at the start of a prompt.
- Blocks below ``INDEX_TOKENS_MIN`` tokens (SGLang's pages of one token), and vLLM's partial blocks, are gathered into
  index blocks. An index block is held while the engine holds the block that completes it.
- A rank cannot hold more blocks than its GPU memory has. If the table counts more copies, the engine reports removals
  in another way. The table then ignores copies. If too many blocks remain, it forgets the rank's blocks.
- After lost messages, each block counts as one copy, because removals may be among the lost messages. Copies of blocks
  that are stored later are counted.
- A member has at most ``BLOCKS_MAX`` blocks, and a pool ``POOL_BLOCKS_MAX``. Further blocks are ignored until engines
  remove others.

Memory per million cached tokens in blocks of 16 (``python -m bench memory``): 7.7 MB, of which 2.2 MB are the member's
table and 5.5 MB the pool's dictionary. Members that hold the same blocks share the dictionary's part. Two blocks with
the same tokens and different hashes (by lookahead tokens, for example) are one block of the dictionary. The removal of
one of them removes both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from dualmap.engines.block_table import BlockTable
from dualmap.engines.events import Batch, Removed, Stored
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.parked_stores import ParkedStores
from dualmap.engines.source import Clear, ForgetCopies
from dualmap.engines.token_chain import KEY_SHIFT, TOKEN_BYTES, TokenChain, link_block, link_media, token_root
from dualmap.prompts.blocks import PUBLIC_KEY

BLOCKS_MAX: Final = 262144
"""The most blocks of a member that the router stores."""
POOL_BLOCKS_MAX: Final = 8388608
"""The most blocks of all members of a pool that the router stores."""
TAIL_BYTES_MAX: Final = 16777216
"""The most bytes of token ids of a member's blocks that end inside an index block; above, such blocks are ignored."""
GROUPS_MAX: Final = 64
"""The most groups of blocks of a member, over all ranks; the events of further groups are ignored."""
REMOVED_MAX: Final = 2048
"""The most removed blocks of a member that the router stores because the engine may still have a copy."""
INDEX_TOKENS_MIN: Final = 16
"""The smallest index block. Engines' smaller blocks are gathered, so that a pick does not search for every token."""


KvChange = Batch | Clear | ForgetCopies
"""A change of the blocks of one rank, in the order in which its source asks for it."""


@dataclass(slots=True, kw_only=True)
class EventCounts:
    """How many blocks the events of a member concerned, by what became of them."""

    stored: int = 0
    copied: int = 0
    reported: int = 0
    removed: int = 0
    cleared: int = 0
    unknown_removals: int = 0
    elsewhere: int = 0
    sparse: int = 0
    over_bound: int = 0
    held_again: int = 0
    drifts: int = 0
    unknown_events: int = 0
    unknown_fields: int = 0
    invalid_events: int = 0


class Residency:
    """The blocks that one member holds.

    ``held`` is the pool's dictionary of held blocks. ``capacity_blocks`` is the number of blocks in the GPU memory of
    one rank, None if it is unknown. ``awaited`` are the keys of prompts by the key of their last block. Of the last
    blocks, ``take_arrived`` returns the stored ones.
    """

    def __init__(
        self,
        held: HeldBlocks,
        *,
        model: str,
        key: bytes = PUBLIC_KEY,
        capacity_blocks: int | None = None,
        awaited: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.counts = EventCounts()
        self._held = held
        self._model = model
        self._key = key
        self._secret = int.from_bytes(blake2b(digest_size=8, key=key, person=b"block table").digest(), "little")
        self._capacity = capacity_blocks
        # The ranks whose copies are no longer counted.
        self._uncounted: set[int] = set()
        # None stands for a group whose blocks have no positions.
        self._groups: dict[tuple[int, int | None], _Group | None] = {}
        self._parked = ParkedStores()
        self._awaited = {} if awaited is None else awaited
        self._arrived: dict[tuple[int, int], None] = {}
        self._faults: dict[int, str] = {}

    @property
    def block_tokens(self) -> int | None:
        """The tokens of an index block, None before the first store. Chains for this member need this block size."""
        return max((group.index_tokens for group in self._each()), default=None)

    @property
    def blocks(self) -> int:
        """The number of different blocks that the member holds, without copies."""
        return sum(len(group.table) for group in self._each())

    @property
    def parked(self) -> int:
        """The number of blocks that wait for their parent."""
        return len(self._parked)

    def fault(self, rank: int) -> str:
        """Return why blocks of a rank are missing, or the empty string."""
        return self._faults.get(rank, "")

    def resize(self, capacity_blocks: int | None) -> None:
        """Set the number of blocks in the GPU memory of one rank."""
        self._capacity = capacity_blocks
        for rank in {rank for rank, _ in self._groups}:
            self._check_drift(rank)

    def apply(self, rank: int, batch: Batch) -> None:
        """Apply the events of a message; ``rank`` is the rank of the source that sent it."""
        counts = self.counts
        counts.unknown_events += batch.unknown_events
        counts.unknown_fields += batch.unknown_fields
        counts.invalid_events += batch.invalid_events
        if batch.invalid_events:
            self._faults[rank] = "an event was invalid"
        for event in batch.events:
            if isinstance(event, Removed):
                self._remove(rank, event)
            elif isinstance(event, Stored):
                self._store(rank, event)
            else:
                self.counts.cleared += 1
                self.clear(rank)
        self._check_drift(rank)

    def clear(self, rank: int | None = None) -> None:
        """Forget the blocks of a rank, or of all ranks of an engine that restarted."""
        for each, number in [key for key in self._groups if rank is None or key[0] == rank]:
            group = self._groups.pop((each, number))
            if group is not None:
                self._leave(group)
        if rank is None:
            self._faults.clear()
            self._uncounted.clear()
        else:
            self._faults.pop(rank, None)
            self._uncounted.discard(rank)

    def forget_copies(self, rank: int) -> None:
        """Count each block of a rank once, because removals of copies may be missing."""
        for (each, _), group in self._groups.items():
            if each == rank and group is not None:
                group.table.forget_copies()

    def is_held(self, chain: TokenChain) -> bool:
        """Return whether any rank holds the last block of a prompt, and no block before was forgotten too early."""
        if not chain.keys or not self.holds(chain.keys[-1]):
            return not chain.keys
        if not any(group.removed for group in self._each()):
            return True
        return self.matched_tokens(chain) >= chain.reusable_tokens(len(chain.keys))

    def holds(self, key: int) -> bool:
        """Return whether any rank holds an index block."""
        return any(self._held.holds(group.holder, key) for group in self._each())

    def take_arrived(self) -> list[int]:
        """Return the awaited blocks that the engine stored since the last call."""
        arrived, self._arrived = [key for _, key in self._arrived], {}
        return arrived

    def matched_tokens(self, chain: TokenChain, found: Mapping[int, int] | None = None) -> int:
        """Return how many tokens of a prompt the member reuses, at its best rank.

        ``found`` is the result of ``HeldBlocks.leading_blocks`` for the chain, which is the same for all members.
        """
        if found is None:
            found = self._held.leading_blocks(chain)
        blocks: dict[int, int] = {}
        for (rank, _), group in self._groups.items():
            if group is not None and group.index_tokens == chain.block_tokens:
                held = found.get(group.holder, 0)
                blocks[rank] = min(blocks.get(rank, held), held)
        return chain.reusable_tokens(max(blocks.values(), default=0))

    def _each(self) -> Iterator["_Group"]:
        return (group for group in self._groups.values() if group is not None)

    def _remove(self, rank: int, event: Removed) -> None:
        if not event.on_gpu:
            self.counts.elsewhere += len(event.hashes)
            return
        group = self._groups.get((rank, event.group))
        if group is None:
            self.counts.unknown_removals += len(event.hashes)
            return
        before = len(group.table)
        remove = group.table.remove
        gone: list[int] = []
        waited = unknown = 0
        for block in event.hashes:
            link = remove(block)
            if link is None:
                if self._parked and self._parked.remove(group.holder, block):
                    waited += 1
                else:
                    unknown += 1
            elif link >= 0:
                gone.append(link)
                if group.table.may_remain:
                    self._remember(group, block, link)
        self._held.stored += len(group.table) - before
        self.counts.unknown_removals += unknown
        self.counts.removed += len(event.hashes) - unknown - waited
        self._held.drop(group.holder, gone)

    def _store(self, rank: int, event: Stored) -> None:
        if not event.on_gpu:
            self.counts.elsewhere += len(event.hashes)
            return
        group = self._group_of(rank, event)
        if group is None:
            return
        waiting = [event]
        while waiting:
            each = waiting.pop()
            if self._place(rank, group, each) and self._parked:
                for block in each.hashes:
                    waiting += self._parked.take(group.holder, block)

    def _group_of(self, rank: int, event: Stored) -> "_Group | None":
        """Return the group of a store; None if its blocks are ignored."""
        key = (rank, event.group)
        known = key in self._groups
        if not known and len(self._groups) >= GROUPS_MAX:
            self.counts.over_bound += len(event.hashes)
            return None
        group = self._groups.get(key)
        if not event.dense or (known and group is None):
            self.counts.sparse += len(event.hashes)
            if group is not None:
                self._leave(group)
            self._groups[key] = None
            return None
        if group is not None and event.block_tokens > group.block_tokens:
            # The earlier blocks were partial, or the engine restarted with another block size.
            self._leave(group)
            group = None
        if group is None:
            group = _Group(event.block_tokens, self._held.join(), self._secret)
            self._groups[key] = group
        return group

    def _place(self, rank: int, group: "_Group", event: Stored) -> bool:
        """Add the blocks of a store behind their parent; return False if the parent is unknown."""
        table, counts = group.table, self.counts
        parent = self._parent_of(rank, group, event)
        if parent is None:
            return False
        link, tail = parent
        arrived = [] if event.parent is None else [link >> KEY_SHIFT]
        index_bytes, size = group.index_tokens * TOKEN_BYTES, event.block_tokens * TOKEN_BYTES
        free = min(BLOCKS_MAX - self.blocks, POOL_BLOCKS_MAX - self._held.stored)
        tail_bytes = TAIL_BYTES_MAX - sum(each.table.tail_bytes for each in self._each() if each is not group)
        counts_copies = rank not in self._uncounted
        awaited = self._awaited
        ended: list[int] = []
        stored = 0
        reported = _is_reported_again(group, event)
        for number, block in enumerate(event.hashes):
            slot = table.seek(block)
            if slot >= 0:
                link, tail = table.place(slot)
                if link >> KEY_SHIFT in awaited:
                    arrived.append(link >> KEY_SHIFT)
                if not reported and counts_copies:
                    counts.copied += 1
                    table.add_copy(slot)
                else:
                    counts.reported += reported
                    table.doubt(slot)
                continue
            if free <= 0 or table.tail_bytes >= tail_bytes:
                counts.over_bound += len(event.hashes) - number
                whole = self.blocks < BLOCKS_MAX and table.tail_bytes < tail_bytes
                bound = f"pool has more than {POOL_BLOCKS_MAX}" if whole else f"member has more than {BLOCKS_MAX}"
                self._faults[rank] = f"the {bound} blocks"
                break
            free -= 1
            stored += 1
            if event.media and event.media[number]:
                link = link_media(link, event.media[number])
            tokens = tail + event.tokens[number * size : (number + 1) * size]
            ends = len(tokens) >= index_bytes
            if ends:
                link = link_block(link, tokens[:index_bytes])
                ended.append(link)
                if link >> KEY_SHIFT in awaited:
                    arrived.append(link >> KEY_SHIFT)
            tail = tokens[index_bytes:] if ends else tokens
            table.add(block, link, tail, ends=ends, sought=slot)
        self._held.hold(group.holder, ended)
        self._held.stored += stored
        counts.stored += stored
        self._note_arrived(group, arrived)
        return True

    def _parent_of(self, rank: int, group: "_Group", event: Stored) -> tuple[int, bytes] | None:
        """Return the link and the tail of the block behind which a store begins; None if the block is unknown."""
        if event.parent is None:
            return token_root(model=self._model, adapter=event.adapter, cache_salt=event.salt, key=self._key), b""
        slot = group.table.find(event.parent)
        if slot < 0 and event.parent in group.removed:
            self._hold_again(group, (event.parent,))
            slot = group.table.find(event.parent)
        if slot >= 0:
            return group.table.place(slot)
        if self._parked.add(group.holder, event, event.parent):
            self._faults[rank] = "too many blocks have an unknown parent"
        return None

    def _note_arrived(self, group: "_Group", arrived: Iterable[int]) -> None:
        """Note the awaited keys among those that arrived, and hold their removed blocks again."""
        awaited = self._awaited
        for key in arrived:
            if key in awaited and (group.holder, key) not in self._arrived:
                self._arrived[group.holder, key] = None
                if group.removed:
                    self._hold_again(
                        group, [group.removed_keys[each] for each in awaited[key] if each in group.removed_keys]
                    )

    def _remember(self, group: "_Group", block: int, link: int) -> None:
        """Store a removed block of which the engine may have another copy."""
        if group.index_tokens != group.block_tokens:
            # Engines with small pages have no copies.
            return
        if sum(len(each.removed) for each in self._each()) >= REMOVED_MAX:
            if not group.removed:
                return
            oldest = next(iter(group.removed))
            group.removed_keys.pop(group.removed.pop(oldest) >> KEY_SHIFT, None)
        group.removed[block] = link
        group.removed_keys[link >> KEY_SHIFT] = block

    def _hold_again(self, group: "_Group", blocks: Sequence[int]) -> None:
        """Hold removed blocks again, because the engine has other copies."""
        table = group.table
        free = min(BLOCKS_MAX - self.blocks, POOL_BLOCKS_MAX - self._held.stored)
        links: list[int] = []
        for block in blocks:
            link = group.removed.pop(block, None)
            if link is None:
                continue
            group.removed_keys.pop(link >> KEY_SHIFT, None)
            if table.find(block) < 0 and len(links) < free:
                table.add(block, link, b"", ends=True)
                # There may be still more copies.
                table.doubt(table.find(block))
                links.append(link)
        self._held.hold(group.holder, links)
        self._held.stored += len(links)
        self.counts.held_again += len(links)

    def _leave(self, group: "_Group") -> None:
        self._parked.clear(group.holder)
        self._held.stored -= len(group.table)
        self._held.leave(group.holder, group.table.ending_links())

    def _check_drift(self, rank: int) -> None:
        """Compare the counted copies with the blocks in the GPU memory."""
        groups = [group for (each, _), group in self._groups.items() if each == rank and group is not None]
        if self._capacity is None or sum(group.table.copies for group in groups) <= self._capacity:
            return
        self.counts.drifts += 1
        self.forget_copies(rank)
        self._uncounted.add(rank)
        if sum(len(group.table) for group in groups) > self._capacity:
            self.clear(rank)
            self._faults[rank] = "the engine reported more blocks than its memory has"


class _Group:
    """A group of a rank's blocks: one holder of the pool's blocks."""

    __slots__ = ("block_tokens", "holder", "index_tokens", "removed", "removed_keys", "table")

    def __init__(self, block_tokens: int, holder: int, secret: int) -> None:
        self.block_tokens = block_tokens
        self.index_tokens = block_tokens * -(-INDEX_TOKENS_MIN // block_tokens)
        self.holder = holder
        self.table = BlockTable(secret)
        # Removed blocks of which the engine may have another copy, the oldest first: the link of each, and the block of
        # each key.
        self.removed: dict[int, int] = {}
        self.removed_keys: dict[int, int] = {}


def _is_reported_again(group: "_Group", event: Stored) -> bool:
    """Return whether an event may repeat an earlier one: its blocks are all known, and it does not call them new.

    A removed block of which the engine may have another copy is known.
    """
    # The other parts of a divided event may contain an unknown block.
    blocks = event.hashes if event.last is None else (*event.hashes, event.last)
    return not event.new and all(group.table.find(block) >= 0 or block in group.removed for block in blocks)
