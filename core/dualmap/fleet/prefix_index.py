"""The index of the blocks that each member is assumed to cache: one tree per pool, and one index per member.

A node of the tree is a run: consecutive blocks without a branch, stored as an array of eight bytes per block. The tree
branches at the blocks at which prompts differ. A block's hash includes all earlier blocks (``dualmap.prompts.blocks``),
so two chains with one equal block also have equal earlier blocks. Bisection therefore finds the block at which a prompt
differs from a run. One search of the tree returns, for every member, how many of a prompt's blocks the member holds.

A member holds complete runs, and for each run all earlier runs. Above its capacity, a member's index evicts the least
recently used leaf first, as engines do. If no other member holds the run, the index evicts only as many of its blocks
as necessary.

Uses are numbered. A run is *used* when a prompt with its blocks is sent to the member, and *computed* when the member
has prefilled such a prompt. Only a computed block was certainly in the member's cache. ``dualmap.fleet.usage`` compares
these numbers when an engine reports fewer cached tokens than the index has.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The most blocks that an index above its capacity evicts for each new block. A capacity that falls for a short time
# therefore evicts little.
_EVICTIONS = 2


class _Run:
    """A node of the tree: consecutive blocks between two branches."""

    __slots__ = ("children", "hashes", "holders", "parent")

    def __init__(self, hashes: Sequence[int], parent: "_Run | None", holders: "tuple[PrefixIndex, ...]") -> None:
        self.hashes = array("Q", hashes)
        self.parent = parent
        self.holders = holders
        # The next runs, by first block. Most runs are ends of prompts without next runs.
        self.children: dict[int, _Run] | None = None

    def attach(self, child: "_Run") -> None:
        """Add ``child`` as a next run; it replaces a run with the same first block."""
        if self.children is None:
            self.children = {}
        self.children[child.hashes[0]] = child
        child.parent = self


# The runs with a prompt's blocks, from block 0 on. Each run has the number of the prompt's blocks up to its end. The
# prompt may match only the first blocks of the last run.
Path = list[tuple[_Run, int]]


class PrefixTree:
    """Every prefix that any member of a pool is assumed to cache."""

    def __init__(self) -> None:
        self.root = _Run((), None, ())

    def path(self, hashes: Sequence[int]) -> Path:
        """Return the path of a prompt's blocks in the tree; it is valid until the tree changes."""
        path: Path = []
        run, at, blocks = self.root, 0, len(hashes)
        while at < blocks and run.children:
            child = run.children.get(hashes[at])
            if child is None:
                break
            run, began = child, at
            at += len(run.hashes)
            if at > blocks or run.hashes[-1] != hashes[at - 1]:
                at = began + _agreement(run.hashes, hashes, began)
                path.append((run, at))
                break
            path.append((run, at))
        return path

    def holders(self, path: Path) -> "Mapping[PrefixIndex, int]":
        """Return each member's number of held blocks of a prompt from block 0 on, without members that hold none."""
        held: dict[PrefixIndex, int] = {}
        for run, at in path:
            # A member that holds a run also holds all earlier runs, so the last run per member counts.
            held.update(dict.fromkeys(run.holders, at))
        return held


class Computed(NamedTuple):
    """Blocks of a prompt up to ``blocks``, in one run, that a member computed or found in its cache at a use.

    ``use`` is the number of the last such use. ``run`` is the hash of the run's first block.
    """

    blocks: int
    use: int
    run: int


class _Use(NamedTuple):
    """A member's last uses of a run; ``blocks`` is how many of the run's blocks it had at the use ``computed``."""

    used: int
    computed: int
    blocks: int


_UNUSED = _Use(0, 0, 0)


class PrefixIndex:
    """The blocks that one member is assumed to cache, at most ``capacity_blocks``.

    The members of a pool share one tree; an index without ``tree`` creates its own.
    """

    def __init__(self, capacity_blocks: int, tree: PrefixTree | None = None) -> None:
        self.tree = tree or PrefixTree()
        self._capacity = capacity_blocks
        self._blocks = 0
        # The least recently used run is first, and every run is after all its next runs in the tree.
        self._held: dict[_Run, _Use] = {}
        self._uses = 0
        # The holders of a run that only this member holds. Most runs have one holder and share this tuple.
        self._alone = (self,)

    def __len__(self) -> int:
        return self._blocks

    def matched_blocks(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's blocks from block 0 on that are in the index."""
        return self.matched_on(self.tree.path(hashes))

    def matched_on(self, path: Path) -> int:
        """Return the number of a prompt's blocks that are in the index, from the prompt's path in the tree."""
        held = self._held
        for run, at in reversed(path):
            if run in held:
                return at
        return 0

    def computed(self, hashes: Sequence[int]) -> tuple[Computed, ...]:
        """Return the runs of a prompt's blocks from block 0 on that the member is known to have computed."""
        found, began = [], 0
        for run, at in self.tree.path(hashes):
            use = self._held.get(run)
            if use is None or not use.blocks:
                break
            found.append(Computed(min(began + use.blocks, at), use.computed, run.hashes[0]))
            began = at
        return tuple(found)

    def add(self, hashes: Sequence[int], *, computed: bool = False) -> None:
        """Record that a prompt's blocks are cached or will be cached, as the most recently used blocks.

        ``computed`` is true if the member's prefill of the prompt has ended.
        If a prompt is longer than the capacity, only its leading blocks are recorded, because only they can be reused.
        """
        head = hashes[: self._capacity] if len(hashes) > self._capacity else hashes
        runs, at, began, before = [], 0, 0, self._blocks
        for run, end in self.tree.path(head):
            runs.append(run)
            began, at = at, end
        if runs and at - began < len(runs[-1].hashes):
            runs[-1] = _split(runs[-1], at - began)
        for run in runs:
            if run not in self._held:
                run.holders += self._alone
                self._blocks += len(run.hashes)
        if at < len(head):
            self._append(runs, head[at:])
        self._use(runs, computed)
        if self._blocks > self._capacity:
            self._drop_excess(most=_EVICTIONS * (self._blocks - before))

    def drop_unused_since(self, use: int) -> list[int]:
        """Remove the blocks whose last use is not later than ``use``; return the first block of each removed run."""
        unused = []
        for run, last in self._held.items():
            if last.used > use:
                break
            unused.append(run)
        for run in unused:
            self._give_up(run)
        return [run.hashes[0] for run in unused]

    def cut(self, hashes: Sequence[int], blocks: int) -> None:
        """Remove a prompt's blocks after the first ``blocks`` blocks, and all runs that follow the removed blocks."""
        began = 0
        for run, at in self.tree.path(hashes):
            if run not in self._held:
                break
            if at > blocks:
                if blocks > began:
                    _split(run, blocks - began)
                self._give_up_from(run)
                break
            began = at

    def resize(self, capacity_blocks: int) -> None:
        """Set another capacity; evict the least recently used blocks above it."""
        self._capacity = capacity_blocks
        self._drop_excess(most=self._blocks)

    def approach(self, capacity_blocks: int) -> None:
        """Set another capacity; evict the blocks above it as new blocks come, _EVICTIONS for each new block."""
        self._capacity = capacity_blocks

    def clear(self) -> None:
        """Remove all blocks: the member restarted or left, or its cache was reset."""
        for run in list(self._held):
            self._give_up(run)

    def _append(self, runs: list[_Run], rest: Sequence[int]) -> None:
        """Append new blocks to the last of a prompt's runs, or start its first run."""
        last = runs[-1] if runs else self.tree.root
        self._blocks += len(rest)
        if last.holders is self._alone and not last.children:
            last.hashes.extend(rest)
            return
        run = _Run(rest, last, self._alone)
        last.attach(run)
        runs.append(run)

    def _use(self, runs: Sequence[_Run], computed: bool) -> None:
        """Make a prompt's runs the most recently used runs, in reverse order, so that its first run is evicted last."""
        self._uses += 1
        held, number = self._held, self._uses
        for run in reversed(runs):
            last = held.pop(run, _UNUSED)
            held[run] = _Use(number, number, len(run.hashes)) if computed else _Use(number, last.computed, last.blocks)

    def _split_use(self, first: _Run, run: _Run, way: Sequence[_Run]) -> None:
        """Divide the uses of a run that was split; move the way to its first part behind all other runs."""
        held, at, last = self._held, len(first.hashes), self._held[run]
        held[first] = _Use(last.used, last.computed, min(last.blocks, at))
        held[run] = _Use(last.used, last.computed, max(last.blocks - at, 0))
        for each in way:
            held[each] = held.pop(each)

    def _drop_excess(self, *, most: int) -> None:
        excess = min(self._blocks - self._capacity, most)
        if excess <= 0:
            return
        victims = []
        for run in self._held:
            victims.append(run)
            excess -= len(run.hashes)
            if excess <= 0:
                break
        last = victims[-1]
        if excess < 0 and last.holders is self._alone:
            self._blocks -= len(last.hashes) + excess
            del last.hashes[-excess:]
            use = self._held[last]
            self._held[last] = use._replace(blocks=min(use.blocks, len(last.hashes)))
            victims.pop()
        for run in victims:
            self._give_up(run)

    def _give_up_from(self, run: _Run) -> None:
        """Remove a run and all runs of this member that follow it."""
        behind = [run]
        for each in behind:
            behind.extend(child for child in (each.children or {}).values() if child in self._held)
        for each in reversed(behind):
            self._give_up(each)

    def _give_up(self, run: _Run) -> None:
        """Remove a run without held next runs from this member; a run without holders is removed from the tree."""
        del self._held[run]
        self._blocks -= len(run.hashes)
        run.holders = tuple(each for each in run.holders if each is not self)
        if len(run.holders) == 1:
            run.holders = run.holders[0]._alone
        elif not run.holders:
            parent = run.parent
            assert parent is not None
            assert parent.children is not None
            del parent.children[run.hashes[0]]


def _split(run: _Run, at: int) -> _Run:
    """Split a run before its block ``at``; return the new first run. ``run`` keeps the other blocks.

    The first run must be evicted after ``run``, so the first run and all earlier runs are evicted as if just used.
    The numbers of their uses do not change.
    """
    parent = run.parent
    assert parent is not None
    first = _Run(run.hashes[:at], parent, run.holders)
    parent.attach(first)
    del run.hashes[:at]
    first.attach(run)
    way, each = [first], parent
    while each.parent is not None:
        way.append(each)
        each = each.parent
    for holder in first.holders:
        holder._split_use(first, run, way)
    return first


def _agreement(run: Sequence[int], hashes: Sequence[int], began: int) -> int:
    """Return how many blocks of a run are equal to a prompt's blocks from ``began`` on; the first block is equal."""
    most = min(len(run), len(hashes) - began)
    return bisect_left(range(most), True, lo=1, key=lambda block: run[block] != hashes[began + block])
