"""The prefix hotness tree: decides the number of blocks in a request's hash key (paper section 3.2, A.1.1).

A key has at least ``initial_blocks`` blocks. A prefix with more than ``split_share`` of the window's requests is split:
keys with this prefix have one more block. The requests with a hot prefix therefore spread over more pairs. A split
prefix is merged again if its share decreases below ``merge_share``. A node's id is the chained hash of its block, which
includes all earlier blocks, so the tree is a dictionary.

Counts are stored in buckets of a sliding window. A request counts its prefixes from the initial length up to the first
prefix that is not in the tree. The request adds that prefix to the tree. A prompt without shared blocks therefore adds
one node. The tree contains all blocks that many requests share, so a key can grow by many blocks at once if its prefix
becomes hot. Counts are sums, so the counts of other router replicas are added. Replicas that have exchanged their
counts and split nodes compute the same keys.

There are three deviations from the paper. The policy sets the thresholds as multiples of ``1/n`` for n members
(published: 2/n and 1/n). Shares are compared at every request instead of between windows, over the window and over its
newest two buckets. A prefix with fewer than MIN_SPLIT_REQUESTS requests is never split.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.replicas.update import HotnessCounts

# A bucket is a twelfth of the window, but at most LONGEST_BUCKET_S, because the newest two buckets are the recent
# traffic.
BUCKETS = 12
LONGEST_BUCKET_S = 5.0
MAX_NODES = 65_536
# The most requests that one update may count: ten seconds of a very busy replica. Other updates are not plausible.
MERGED_REQUESTS_MAX = 100_000
# The smallest number of requests for an estimate of a prefix's share.
MIN_SPLIT_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessRule:
    """The shares of requests above which a prefix is split and below which it is merged, in units of 1/n."""

    split: float
    merge: float


@dataclass(slots=True)
class _Bucket:
    began_s: float
    requests: int = 0
    nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    # The counts of this replica that are not yet sent to the other replicas; they are removed with the bucket.
    unsent_requests: int = 0
    unsent_nodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class HotnessTree:
    """The traffic shares of prefixes over a sliding window, and the resulting key lengths.

    If ``replicated`` is true, the tree stores the counts of ``take_counts``.
    """

    def __init__(self, *, initial_blocks: int, max_blocks: int, window_s: float, replicated: bool = True) -> None:
        self._initial = initial_blocks
        self._max = max_blocks
        self._window_s = window_s
        self._replicated = replicated
        self._bucket_s = min(window_s / BUCKETS, LONGEST_BUCKET_S)
        self._buckets: deque[_Bucket] = deque()
        self._requests = 0
        self._nodes: dict[int, int] = {}
        self._split: set[int] = set()
        self._sent_split: frozenset[int] = frozenset()
        self._sent_bucket_s = 0.0

    @property
    def nodes(self) -> int:
        """The number of prefixes in the window."""
        return len(self._nodes)

    @property
    def split_prefixes(self) -> int:
        """The number of prefixes that are split now."""
        return len(self._split)

    def key_blocks(self, now: float, hashes: Sequence[int], *, split_share: float, merge_share: float) -> int:
        """Count a request and return the number of blocks in its key: at least 1 unless ``hashes`` is empty.

        ``split_share`` and ``merge_share`` are shares of the window's requests (0 to 1).
        """
        bucket = self._bucket_at(now)
        bucket.requests += 1
        bucket.unsent_requests += self._replicated
        self._requests += 1
        deepest = min(len(hashes), self._max)
        if deepest < self._initial:
            return deepest
        self._count(bucket, hashes[self._initial - 1 : deepest])
        # The last of these blocks is the last block that a key may have, so its own split has no effect.
        return self._initial + self._split_run(hashes[self._initial - 1 : deepest - 1], split_share, merge_share)

    def take_counts(self) -> HotnessCounts:
        """Return this replica's counts since the last call, for the other replicas."""
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
        """Add another replica's counts at the time ``said_s``; ignore counts from before the window."""
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
        # If one of these nodes is no longer hot, the next request with its prefix merges it.
        self._split.update(node for node in counts.split if node in self._nodes)

    def _take_split(self) -> tuple[int, ...]:
        bucket_s = self._buckets[-1].began_s if self._buckets else 0.0
        if self._split == self._sent_split and (not self._split or bucket_s == self._sent_bucket_s):
            return ()
        self._sent_split, self._sent_bucket_s = frozenset(self._split), bucket_s
        return tuple(self._split)

    def _count(self, bucket: _Bucket, path: Sequence[int]) -> None:
        """Count a request's prefixes up to the first prefix that is not in the tree, and add that prefix."""
        nodes, in_bucket, unsent, replicated = self._nodes, bucket.nodes, bucket.unsent_nodes, self._replicated
        for node in path:
            before = nodes.get(node)
            if before is None:
                if self._add(bucket, node, 1) and replicated:
                    unsent[node] = 1
                return
            nodes[node] = before + 1
            in_bucket[node] += 1
            if replicated:
                unsent[node] += 1

    def _split_run(self, path: Sequence[int], split_share: float, merge_share: float) -> int:
        """Split or merge prefixes by their shares; return the number of leading prefixes that are split.

        Recent traffic alone can split a node, so a new hot prefix is detected within seconds even if the window
        contains much other traffic. A node is merged only if its shares of the window and of the recent traffic are
        both below the threshold.
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
            if node in split:
                if in_window < merge_window and in_last.get(node, 0) + in_prior.get(node, 0) < merge_recent:
                    split.discard(node)
                    return depth
            elif in_window > split_window or in_last.get(node, 0) + in_prior.get(node, 0) > split_recent:
                split.add(node)
            else:
                return depth
        return len(path)

    def _add(self, bucket: _Bucket, node: int, requests: int) -> bool:
        """Add to a node's count; return False if ``requests`` is 0, or the node is new and the tree is full."""
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
        # If the clock did not advance or was set back, use the newest bucket.
        if not self._buckets or self._buckets[-1].began_s < began_s:
            self._buckets.append(_Bucket(began_s))
        return self._buckets[-1]

    def _bucket_before(self, newest: _Bucket, said_s: float) -> _Bucket:
        """Return the bucket of ``said_s``, a time before the newest bucket; create it if it does not exist."""
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
