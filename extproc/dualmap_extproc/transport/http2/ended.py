"""The memory of a connection for streams that have ended (RFC 9113 section 5.1, state closed)."""

from typing import Final


class EndedStreams:
    """How the streams that ended last ended: at least ``size`` of them, and at most twice as many.

    A stream that both sides ended gets no further frames. On a stream that this side ended first, frames of the peer
    are legal, because they may have been on the way.
    """

    __slots__ = ("_forgotten", "_new", "_old", "_size")

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._new: dict[int, bool] = {}
        self._old: dict[int, bool] = {}
        self._forgotten = 0

    def add(self, stream_id: int, both: bool) -> None:
        """Remember an ended stream, and whether both sides ended it."""
        self._new[stream_id] = both
        if len(self._new) >= self._size:
            self._forgotten = max(self._forgotten, max(self._old, default=0))
            self._old, self._new = self._new, {}

    def ended_by_both(self, stream_id: int) -> bool | None:
        """Return whether both sides ended the stream; None if the stream is forgotten or never existed."""
        ended = self._new.get(stream_id)
        return self._old.get(stream_id) if ended is None else ended

    def may_be_forgotten(self, stream_id: int) -> bool:
        """Return whether an unknown stream may have existed."""
        return stream_id <= self._forgotten
