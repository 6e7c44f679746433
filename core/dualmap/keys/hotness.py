"""The prefix hotness tree: how many blocks a request's hash key spans (paper section 3.2, A.1.1).

A key starts at ``initial_blocks``. A prefix is *split* when it carries more than ``split_share`` of the window's
requests. The key then has one more block, so that the requests behind a hot prefix spread over more pairs. A split
prefix is merged again when its share falls below ``merge_share``. A node is named by its block's chained hash, which
already names the whole path above it, so the tree is a dictionary.

Counts live in buckets of a sliding window. A request counts its prefixes from the initial length down to one block
below what earlier requests have counted. A prefix seen once costs one node. A prefix of many requests is known as deep
as they share it, and its key can grow by many blocks at once when it turns hot. Counts are sums, so the counts of other
router replicas are added to them. Replicas that have exchanged their counts and split nodes agree on every key.

Deviations from the paper: the policy sets the thresholds relative to ``1/n`` (published: 2/n and 1/n). Shares are
compared at every request instead of between windows, over the window and over its newest two buckets. No prefix splits
on fewer than MIN_SPLIT_REQUESTS requests.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.replicas.update import HotnessCounts

# A bucket is a twelfth of the window, but never longer than this: recent traffic is the newest two buckets.
BUCKETS = 12
LONGEST_BUCKET_S = 5.0
MAX_NODES = 65_536
# The most requests that one update may count: ten seconds of a very busy replica. Other updates are not plausible.
MERGED_REQUESTS_MAX = 100_000
# Fewer requests than this are too few to estimate a prefix's share.
MIN_SPLIT_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessRule:
    """Shares of the window's requests above which a prefix splits and below which it merges, in units of 1/n."""

    split: float
    merge: float


@dataclass(slots=True)
class _Bucket:
    began_s: float
    requests: int = 0
    nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    # Counted here and not yet sent to the other replicas; dropped with the bucket if it is never taken.
    unsent_requests: int = 0
    unsent_nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class HotnessTree:
    """The traffic shares of prefixes over a sliding window, and the key lengths that result."""

    def __init__(self, *, initial_blocks: int, max_blocks: int, window_s: float) -> None:
        self._initial = initial_blocks
        self._max = max_blocks
        self._window_s = window_s
        self._bucket_s = min(window_s / BUCKETS, LONGEST_BUCKET_S)
        self._buckets: deque[_Bucket] = deque()
        self._requests = 0
        self._nodes: dict[int, int] = {}
        self._split: set[int] = set()
        self._told_split: frozenset[int] = frozenset()
        self._told_bucket_s = 0.0

    @property
    def nodes(self) -> int:
        """How many prefixes the window knows."""
        return len(self._nodes)

    @property
    def split_prefixes(self) -> int:
        """How many prefixes are split at the moment."""
        return len(self._split)

    def key_blocks(self, now: float, hashes: Sequence[int], *, split_share: float, merge_share: float) -> int:
        """Count a request and return how many blocks its key spans: at least one if there are any, at most all.

        ``split_share`` and ``merge_share`` are shares of the window's requests (0 to 1).
        """
        bucket = self._bucket_at(now)
        bucket.requests += 1
        bucket.unsent_requests += 1
        self._requests += 1
        deepest = min(len(hashes), self._max)
        if deepest < self._initial:
            return deepest
        self._count(bucket, hashes[self._initial - 1 : deepest])
        # The key's last block is the deepest one that may be added, so its own split does not matter.
        return self._initial + self._split_run(hashes[self._initial - 1 : deepest - 1], split_share, merge_share)

    def take_counts(self) -> HotnessCounts:
        """Return what was counted here since the last call, for the other replicas."""
        requests, nodes = 0, dict[int, int]()
        for bucket in self._buckets:
            if not bucket.unsent_requests:
                continue
            requests += bucket.unsent_requests
            for node, count in bucket.unsent_nodes.items():
                nodes[node] = nodes.get(node, 0) + count
            bucket.unsent_requests, bucket.unsent_nodes = 0, defaultdict(int)
        return HotnessCounts(requests=requests, nodes=nodes, split=self._take_split())

    def merge(self, said_s: float, counts: HotnessCounts) -> None:
        """Add what another replica counted around ``said_s``; ignored if that is before the window."""
        newest = self._bucket_at(said_s)
        if said_s <= newest.began_s - self._window_s:
            return
        bucket = newest if said_s >= newest.began_s else self._bucket_before(newest, said_s)
        total = min(counts.requests, MERGED_REQUESTS_MAX)
        bucket.requests += total
        self._requests += total
        for node, requests in counts.nodes.items():
            # A prefix has at most all requests.
            self._add(bucket, node, min(requests, total))
        # If one of them is cold by now, the next request behind it merges it.
        self._split.update(node for node in counts.split if node in self._nodes)

    def _take_split(self) -> tuple[int, ...]:
        bucket_s = self._buckets[-1].began_s if self._buckets else 0.0
        if self._split == self._told_split and (not self._split or bucket_s == self._told_bucket_s):
            return ()
        self._told_split, self._told_bucket_s = frozenset(self._split), bucket_s
        return tuple(self._split)

    def _count(self, bucket: _Bucket, path: Sequence[int]) -> None:
        """Count a request's prefixes, down to the first one that was unknown."""
        nodes, in_bucket, unsent = self._nodes, bucket.nodes, bucket.unsent_nodes
        for node in path:
            before = nodes.get(node)
            if before is None:
                if self._add(bucket, node, 1):
                    unsent[node] = 1
                return
            nodes[node] = before + 1
            in_bucket[node] += 1
            unsent[node] += 1

    def _split_run(self, path: Sequence[int], split_share: float, merge_share: float) -> int:
        """Split or merge prefixes by their shares; return how many from the first on are split now.

        Recent traffic alone can split a node, so a prefix that turns hot is noticed within seconds while the window is
        still full of other traffic. A node is merged only if it is cold in both.
        """
        last, prior = self._buckets[-1], self._buckets[-2] if len(self._buckets) > 1 else None
        recent_requests = last.requests + (prior.requests if prior else 0)
        window, split = self._nodes, self._split
        in_last: Mapping[int, int] = last.nodes
        in_prior: Mapping[int, int] = prior.nodes if prior else {}
        split_window = max(split_share * self._requests, MIN_SPLIT_REQUESTS - 1)
        split_recent = max(split_share * recent_requests, MIN_SPLIT_REQUESTS - 1)
        merge_window, merge_recent = merge_share * self._requests, merge_share * recent_requests
        for depth, node in enumerate(path):
            in_window = window.get(node, 0)
            in_recent = in_last.get(node, 0) + in_prior.get(node, 0)
            if node in split:
                if in_window < merge_window and in_recent < merge_recent:
                    split.discard(node)
                    return depth
            elif in_window > split_window or in_recent > split_recent:
                split.add(node)
            else:
                return depth
        return len(path)

    def _add(self, bucket: _Bucket, node: int, requests: int) -> bool:
        """Add to a node's count; return False if there is nothing to add, or the node is new and the tree is full."""
        before = self._nodes.get(node)
        if requests <= 0 or (before is None and len(self._nodes) >= MAX_NODES):
            return False
        self._nodes[node] = (before or 0) + requests
        bucket.nodes[node] += requests
        return True

    def _bucket_at(self, now: float) -> _Bucket:
        """Remove buckets older than the window; return the bucket of ``now``."""
        began_s = now - now % self._bucket_s
        while self._buckets and self._buckets[0].began_s <= began_s - self._window_s:
            self._forget(self._buckets.popleft())
        # If the clock stood still or was set back, the newest bucket counts.
        if not self._buckets or self._buckets[-1].began_s < began_s:
            self._buckets.append(_Bucket(began_s))
        return self._buckets[-1]

    def _bucket_before(self, newest: _Bucket, said_s: float) -> _Bucket:
        """Return the bucket of a time before the newest one's, which may have had no requests until now."""
        began_s = said_s - said_s % self._bucket_s
        at = bisect_left(self._buckets, began_s, key=lambda each: each.began_s)
        if self._buckets[at].began_s != began_s:
            self._buckets.insert(at, _Bucket(began_s))
        return self._buckets[at]

    def _forget(self, bucket: _Bucket) -> None:
        self._requests -= bucket.requests
        for node, requests in bucket.nodes.items():
            left = self._nodes[node] - requests
            if left:
                self._nodes[node] = left
            else:
                del self._nodes[node]
                self._split.discard(node)
