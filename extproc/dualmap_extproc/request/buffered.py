"""The bound on the bytes of all request bodies that the router stores."""

from typing import Protocol


class Holder(Protocol):
    """A stream that stores a request's body."""

    held_bytes: int

    def evict(self, now: float) -> None:
        """Refuse the request and release its body."""
        ...


class BufferedBodies:
    """Counts the bytes of the bodies that all streams store, and bounds their sum.

    If the sum would exceed ``limit_bytes``, the largest body that is still arriving is refused. Many slow, large
    bodies therefore do not displace small requests. A body that has arrived is never refused for another one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._arriving: set[Holder] = set()
        self.held_bytes = 0

    def hold(self, now: float, holder: Holder, size_bytes: int) -> bool:
        """Count further bytes of an arriving body; return False if the holder must refuse its own request instead."""
        if not size_bytes:
            return True
        holder.held_bytes += size_bytes
        self.held_bytes += size_bytes
        self._arriving.add(holder)
        while self.held_bytes > self._limit_bytes:
            largest = max(self._arriving, key=lambda each: each.held_bytes)
            if largest.held_bytes <= holder.held_bytes:
                return False
            largest.evict(now)
        return True

    def arrived(self, holder: Holder) -> None:
        """Record that a holder's body is complete, so that other bodies no longer displace it."""
        self._arriving.discard(holder)

    def release(self, holder: Holder) -> None:
        """Stop counting a holder's bytes."""
        self.held_bytes -= holder.held_bytes
        holder.held_bytes = 0
        self._arriving.discard(holder)
