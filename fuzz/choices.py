"""Reads bytes as choices, so that any input is a sequence of steps, and a small change has small effects."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Takes choices from the front of ``data``. If no bytes are left, every choice is the first option."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        """Whether any bytes are left."""
        return self._at < len(self._data)

    def number(self, size: int = 1) -> int:
        """Return a whole number that is ``size`` bytes long."""
        return int.from_bytes(self.take(size), "little")

    def flag(self) -> bool:
        """Return whether the next byte is odd."""
        return self.number() % 2 == 1

    def pick(self, options: Sequence[T]) -> T:
        """Return one of at most 256 options."""
        return options[self.number() % len(options)]

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, or all remaining bytes if there are fewer."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def chunk(self) -> bytes:
        """Read a length from one byte; return that many bytes."""
        return self.take(self.number())

    def text(self) -> str:
        """Return a chunk as text; invalid bytes are replaced."""
        return self.chunk().decode("utf-8", "replace")
