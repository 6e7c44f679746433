"""Two independent hash rings that map a key to its pair of members (paper sections 3.2 and 3.4).

A ring is an immutable snapshot of the members that new keys may map to; a change of membership creates a new ring. The
mapping depends on the members' ids and weights only, not on their order, addresses or restarts. A member that leaves
and joins again gets the same keys.

There are two deviations from the paper. The paper's ring has one anchor per instance, so the shares of the instances
are very unequal. This module's rings use weighted rendezvous hashing (a key maps to the member with the highest score)
or ``virtual_nodes`` anchors per member. If both rings map a key to the same member, the paper's second candidate is
``id + 1 mod n`` (eq. 5). This module uses the next distinct member on ring 2, which keeps the pair stable when
membership changes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import log
from typing import Protocol

from xxhash import xxh3_64_intdigest

from dualmap.pools.pool import Member, Ring, RingAlgorithm

_FULL_WEIGHT = 100
_MEMO_KEYS = 32_768
_TWO_64 = 2**64

Pair = tuple[str, ...]


class HashRing(Protocol):
    """One ring: an order of the members for each key."""

    def best(self, key: int) -> str:
        """Return the member that a key maps to."""

    def best_two(self, key: int) -> tuple[str, str]:
        """Return the first two distinct members for a key; the ring must have at least two members."""

    def walk(self, key: int) -> Iterator[str]:
        """Return every member once, in the ring's order for the key."""

    def shares(self) -> dict[str, float]:
        """Return the share of all keys (0 to 1) that maps to each member."""


class RendezvousRing:
    """Weighted rendezvous (highest random weight) hashing: shares are proportional to weights, O(members) per key."""

    def __init__(self, members: Sequence[Member], *, seed: int) -> None:
        self._ids = [member.id for member in members]
        self._seeds = [xxh3_64_intdigest(member.id.encode(), seed) for member in members]
        weights = {member.weight for member in members}
        # With equal weights, the order of the scores is the order of the hashes, so no logarithm is needed.
        self._weights = None if len(weights) == 1 else [member.weight for member in members]

    def _scores(self, key: int) -> Sequence[int] | Sequence[float]:
        data = key.to_bytes(8, "little")
        digests = [xxh3_64_intdigest(data, seed) for seed in self._seeds]
        if self._weights is None:
            return digests
        return [weight / -log((digest + 0.5) / _TWO_64) for digest, weight in zip(digests, self._weights, strict=True)]

    def best(self, key: int) -> str:
        """Return the member with the highest score for the key."""
        scores = self._scores(key)
        return self._ids[scores.index(max(scores))]

    def best_two(self, key: int) -> tuple[str, str]:
        """Return the members with the highest and the second-highest score for the key."""
        scores = list(self._scores(key))
        first = scores.index(max(scores))
        scores[first] = -1.0
        return self._ids[first], self._ids[scores.index(max(scores))]

    def walk(self, key: int) -> Iterator[str]:
        """Return every member once, in the order of decreasing score for the key."""
        scores = self._scores(key)
        return (self._ids[each] for each in sorted(range(len(scores)), key=scores.__getitem__, reverse=True))

    def shares(self) -> dict[str, float]:
        """Return each member's share of the keys, which is its share of the weights."""
        weights = self._weights or [1] * len(self._ids)
        total = sum(weights)
        return {member: weight / total for member, weight in zip(self._ids, weights, strict=True)}


class VirtualNodeRing:
    """Consistent hashing: each member has anchors in proportion to its weight; O(log anchors) per key."""

    def __init__(self, members: Sequence[Member], *, seed: int, virtual_nodes: int) -> None:
        anchors = [
            (xxh3_64_intdigest(f"{member.id}\x00{number}".encode(), seed), member.id)
            for member in members
            for number in range(max(1, round(virtual_nodes * member.weight / _FULL_WEIGHT)))
        ]
        anchors.sort()
        self._points = [point for point, _ in anchors]
        self._owners = [owner for _, owner in anchors]
        self._seed = seed

    def _first(self, key: int) -> int:
        point = xxh3_64_intdigest(key.to_bytes(8, "little"), self._seed)
        return bisect_left(self._points, point) % len(self._points)

    def best(self, key: int) -> str:
        """Return the owner of the first anchor clockwise of the key."""
        return self._owners[self._first(key)]

    def best_two(self, key: int) -> tuple[str, str]:
        """Return the owner of the first anchor clockwise of the key, and the next different owner."""
        start = self._first(key)
        first = self._owners[start]
        for step in range(1, len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner != first:
                return first, owner
        raise AssertionError("best_two requires a ring with at least two members")

    def walk(self, key: int) -> Iterator[str]:
        """Return every member once, in the order of their first anchors clockwise of the key."""
        start, met = self._first(key), set[str]()
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in met:
                met.add(owner)
                yield owner

    def shares(self) -> dict[str, float]:
        """Return each member's share of the keys: the total length of the arcs before its anchors."""
        shares = dict.fromkeys(self._owners, 0.0)
        before = self._points[-1] - _TWO_64
        for point, owner in zip(self._points, self._owners, strict=True):
            shares[owner] += (point - before) / _TWO_64
            before = point
        return shares


class DualRing:
    """An immutable snapshot of both rings over the members that new keys may map to."""

    def __init__(self, members: Iterable[Member], spec: Ring) -> None:
        self.members = tuple(sorted((m for m in members if m.takes_new_keys), key=lambda member: member.id))
        self._positions = {member.id: position for position, member in enumerate(self.members)}
        self.ids = frozenset(self._positions)
        self._spec = spec
        self._rings = (self._ring(1), self._ring(2)) if len(self.members) > 1 else None
        # A cache of pairs: conversations repeat the same keys, and a key's pair never changes within a snapshot.
        self._memo: dict[int, Pair] = {}

    def _ring(self, number: int) -> HashRing:
        seed = xxh3_64_intdigest(f"dualmap ring {number}".encode(), self._spec.seed)
        if self._spec.algorithm is RingAlgorithm.RENDEZVOUS:
            return RendezvousRing(self.members, seed=seed)
        return VirtualNodeRing(self.members, seed=seed, virtual_nodes=self._spec.virtual_nodes)

    def pair(self, key: int) -> Pair:
        """Return the ids of the key's two distinct candidates, in ring order.

        The result has one id if the ring has one member, and is empty for an empty ring.
        """
        if self._rings is None:
            return tuple(member.id for member in self.members)
        pair = self._memo.get(key)
        if pair is None:
            pair = self._find_pair(key, *self._rings)
            if len(self._memo) >= _MEMO_KEYS:
                self._memo.clear()
            self._memo[key] = pair
        return pair

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the share of all keys (0 to 1) that ring 1 and ring 2 map to each member, for display."""
        if self._rings is None:
            return {member.id: 1.0 for member in self.members}, {member.id: 1.0 for member in self.members}
        ring_1, ring_2 = self._rings
        return ring_1.shares(), ring_2.shares()

    def walk(self, key: int) -> Iterator[int]:
        """Return the positions of all members in ``members``, in the order of ring 1 for the key."""
        if self._rings is None:
            return iter(range(len(self.members)))
        return map(self._positions.__getitem__, self._rings[0].walk(key))

    @staticmethod
    def _find_pair(key: int, ring_1: HashRing, ring_2: HashRing) -> Pair:
        first = ring_1.best(key)
        second, next_distinct = ring_2.best_two(key)
        return first, second if second != first else next_distinct
