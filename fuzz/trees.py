"""Mutates parsed JSON and YAML, so that a mutant is still a valid document and passes the parser."""

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeAlias

# A container and one of its keys or indexes.
_Slot: TypeAlias = tuple[Any, Any]

_ODD_VALUES: Final[tuple[object, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, 0.5, -0.0, 1e308, "", " ", "0", "\n", "\0"),
    *("\x1e", "\x1f", "\N{SNOWMAN}", "\U0001f600", "é", "a" * 300, [], {}, [[]], [{}], {"": ""}, [1, 2, 3], [[1], [2]]),
)


def mutate(tree: object, random: Random, words: Sequence[str]) -> object:
    """Return a copy of a tree of mappings, lists and scalars with one to four changes.

    ``words`` are the names and values with a meaning in this kind of document.
    """
    root = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, 4)):
        slots = _slots(root)
        random.choice(_CHANGES)(random.choice(slots), slots, random, words)
    return root[0] if root else None


def _slots(root: list[object]) -> list[_Slot]:
    """Return every position of a tree, starting with the root's position."""
    slots: list[_Slot] = []
    # The search is breadth first, so it handles a tree of any depth. The search is limited, because changes may insert
    # the tree into itself.
    open_nodes: list[Any] = [root]
    for node in open_nodes:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        slots.extend((node, key) for key in keys)
        open_nodes.extend(node[key] for key in keys if isinstance(node[key], dict | list))
        if len(slots) > 10_000:
            break
    return slots


def _value(slots: list[_Slot], random: Random, words: Sequence[str]) -> object:
    """Return an unusual value, a word, or a copy of the value at another position."""
    kind = random.randrange(3)
    if kind == 0:
        return copy.deepcopy(random.choice(_ODD_VALUES))
    if kind == 1:
        return random.choice(words)
    container, key = random.choice(slots)
    return copy.deepcopy(container[key])


def _replace(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    container, key = slot
    container[key] = _value(slots, random, words)


def _remove(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    container, key = slot
    # The root stays, because later changes need it.
    if container is not slots[0][0]:
        del container[key]


def _rename(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    container, key = slot
    if isinstance(container, dict):
        container[random.choice(words)] = container.pop(key)


def _insert(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    container, key = slot
    grown = container[key] if isinstance(container[key], dict | list) else container
    if isinstance(grown, dict):
        grown[random.choice(words)] = _value(slots, random, words)
    elif grown is not slots[0][0]:
        grown.insert(random.randint(0, len(grown)), _value(slots, random, words))


def _wrap(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    container, key = slot
    container[key] = [container[key]] if random.random() < 0.5 else {random.choice(words): container[key]}


def _edit(slot: _Slot, slots: list[_Slot], random: Random, words: Sequence[str]) -> None:
    """Make a small change to a scalar."""
    container, key = slot
    match container[key]:
        case bool(value):
            container[key] = not value
        case int(value) | float(value):
            container[key] = value + random.choice((-1, 1, 1000, -1000)) if random.random() < 0.5 else -value
        case str(value):
            at = random.randint(0, len(value))
            container[key] = value[:at] + random.choice(("", "\x1e", "\x1f", "0", "-", ".", "é")) + value[at + 1 :]


_CHANGES: Final[tuple[Callable[[_Slot, list[_Slot], Random, Sequence[str]], None], ...]] = (
    *(_replace, _remove, _rename, _insert, _wrap, _edit),
)
