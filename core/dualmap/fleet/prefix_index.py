"""The index of what each member is believed to cache: one tree of block runs per pool, one account per member.

The tree stores blocks that are always used together as one run, an array of eight bytes per block, and branches where
prompts differ. A block's hash names everything before it (``dualmap.prompts.blocks``), so two chains that agree in one
block agree in all before it. Bisection finds where a prompt leaves a run, and one walk down the tree shows for every
member how much of a prompt it holds.

A member holds whole runs, and with a run everything before it. Beyond its capacity it evicts the least recently used
leaf first, as engines do; of a run that no other member holds it evicts only as much as needed.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence


class _Run:
    """Blocks that follow each other, from one parting of prompts to the next."""

    __slots__ = ("children", "hashes", "holders", "parent")

    def __init__(self, hashes: Sequence[int], parent: "_Run | None", holders: "tuple[PrefixIndex, ...]") -> None:
        self.hashes = array("Q", hashes)
        self.parent = parent
        self.holders = holders
        # The runs that follow, by first block. Most runs are the ends of prompts and have none.
        self.children: dict[int, _Run] | None = None

    def attach(self, child: "_Run") -> None:
        """Make ``child`` follow this run, in place of any run that began with the same block."""
        if self.children is None:
            self.children = {}
        self.children[child.hashes[0]] = child
        child.parent = self


# The runs that a prompt follows from block 0 on, each with how many of the prompt's blocks it has followed by its end.
# The prompt may leave the last run early.
Path = list[tuple[_Run, int]]


class PrefixTree:
    """Every prefix that some member of a pool is believed to cache."""

    def __init__(self) -> None:
        self.root = _Run((), None, ())

    def path(self, hashes: Sequence[int]) -> Path:
        """Return the path of a prompt's blocks down the tree, valid until the tree changes."""
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
        """Return how many of a prompt's blocks each member holds from block 0 on, for those that hold any."""
        held: dict[PrefixIndex, int] = {}
        for run, at in path:
            # A member that holds a run holds all before it, so a member's deepest run counts.
            held.update(dict.fromkeys(run.holders, at))
        return held


class PrefixIndex:
    """The blocks that one member is believed to cache, at most ``capacity_blocks`` of them.

    Members of a pool share its tree; an index without one has a tree to itself.
    """

    def __init__(self, capacity_blocks: int, tree: PrefixTree | None = None) -> None:
        self._tree = tree or PrefixTree()
        self._capacity = capacity_blocks
        self._blocks = 0
        # Least recently used first, and every run after all runs that follow it in the tree.
        self._held: dict[_Run, None] = {}
        # The holders of a run that only this member holds: most runs, which share this one tuple.
        self._alone = (self,)

    def __len__(self) -> int:
        return self._blocks

    def matched_blocks(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt are held from block 0 on."""
        return self.matched_on(self._tree.path(hashes))

    def matched_on(self, path: Path) -> int:
        """Return how many blocks of a prompt with a known path in the tree are in the index."""
        held = self._held
        for run, at in reversed(path):
            if run in held:
                return at
        return 0

    def add(self, hashes: Sequence[int]) -> None:
        """Record that a prompt's blocks are (about to be) cached, as the most recent use.

        Only the head of a prompt longer than the whole capacity is recorded, since only that could be reused.
        """
        head = hashes[: self._capacity] if len(hashes) > self._capacity else hashes
        path = self._tree.path(head)
        runs = [run for run, _ in path]
        at = path[-1][1] if path else 0
        if path:
            began = path[-2][1] if len(path) > 1 else 0
            if at - began < len(runs[-1].hashes):
                runs[-1] = _split(runs[-1], at - began)
        for run in runs:
            if run not in self._held:
                run.holders += self._alone
                self._blocks += len(run.hashes)
        if at < len(head):
            self._append(runs, head[at:])
        self._use(runs)
        self._drop_excess()

    def cut(self, hashes: Sequence[int], blocks: int) -> None:
        """Forget all but the first ``blocks`` blocks of a prompt, and everything that is held behind the others."""
        began = 0
        for run, at in self._tree.path(hashes):
            if run not in self._held:
                break
            if at > blocks:
                if blocks > began:
                    _split(run, blocks - began)
                self._give_up_from(run)
                break
            began = at

    def resize(self, capacity_blocks: int) -> None:
        """Set another capacity; evict what no longer fits, least recently used first."""
        self._capacity = capacity_blocks
        self._drop_excess()

    def clear(self) -> None:
        """Forget everything: the member restarted or left the pool, or its cache was reset."""
        for run in list(self._held):
            self._give_up(run)

    def _append(self, runs: list[_Run], rest: Sequence[int]) -> None:
        """Append new blocks to the last of a prompt's runs, or start its first run."""
        last = runs[-1] if runs else self._tree.root
        self._blocks += len(rest)
        if last.holders is self._alone and not last.children:
            last.hashes.extend(rest)
            return
        run = _Run(rest, last, self._alone)
        last.attach(run)
        runs.append(run)

    def _use(self, runs: Sequence[_Run]) -> None:
        """Make a prompt's runs the most recently used, the first of them last."""
        held = self._held
        for run in reversed(runs):
            held.pop(run, None)
            held[run] = None

    def _drop_excess(self) -> None:
        excess = self._blocks - self._capacity
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
            victims.pop()
        for run in victims:
            self._give_up(run)

    def _give_up_from(self, run: _Run) -> None:
        """Stop holding a run and all that is held behind it."""
        behind = [run]
        for each in behind:
            behind.extend(child for child in (each.children or {}).values() if child in self._held)
        for each in reversed(behind):
            self._give_up(each)

    def _give_up(self, run: _Run) -> None:
        """Stop holding a run behind which nothing is held; a run without any holder leaves the tree."""
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
    """Cut a run before its block ``at`` and return the new first part; ``run`` becomes what follows it.

    The second part keeps its age at every holder. The first part must be evicted later, so it counts as just used, and
    so do all runs before it.
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
        holder._use(way[::-1])
    return first


def _agreement(run: Sequence[int], hashes: Sequence[int], began: int) -> int:
    """Return how many blocks of a run agree with a prompt's from its block ``began`` on; the first one does."""
    most = min(len(run), len(hashes) - began)
    return bisect_left(range(most), True, lo=1, key=lambda block: run[block] != hashes[began + block])
