"""Subscribes to the observations of requests, and hands ended requests to the writer's thread."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.requests import Request
from dualmap_edge.logs import get_logger
from dualmap_extproc.recording.hashing import Purpose
from dualmap_extproc.recording.requests import OpenRequest
from dualmap_extproc.recording.writer import Batch, Writer
from dualmap_extproc.request.observations import (
    Abandoned,
    Accepted,
    Ended,
    Expired,
    FanOut,
    FirstTokenSeen,
    Logged,
    PoolsChanged,
    Rejected,
    Routed,
)

REQUEST_ID: Final = "x-request-id"
"""The header that names a request."""
TICK_S: Final = 1.0
"""The time between two batches."""
USAGE_S: Final = 2.0
"""The longest time that an ended request waits for the access log's entry."""
OPEN_MAX: Final = 100_000
"""The most requests without an end. The oldest is dropped first."""
UNWRITTEN_MAX: Final = 50_000
"""The most ended requests that are not written."""
UNWRITTEN_BLOCKS_MAX: Final = 2_000_000
"""The most blocks of these requests: 80 MB."""
CLOSE_S: Final = 3.0
"""The longest time that the router waits for the last batch before it ends."""
_log = get_logger(__name__)


class Recorder:
    """A subscriber that records the share ``sample`` of all sessions, through a ``writer``.

    ``offset_s`` returns the time since the epoch at which the clock of observations is 0.
    """

    def __init__(self, writer: Writer, *, sample: float, offset_s: Callable[[], float]) -> None:
        self._writer = writer
        # The sampled hashes are those below this limit.
        self._sampled_below = None if sample >= 1.0 else int(sample * 2**64)
        self._offset_s = offset_s
        self._open: OrderedDict[str, OpenRequest] = OrderedDict()
        # Ended requests without an entry in the access log, in the order of their ends.
        self._unlogged: OrderedDict[str, OpenRequest] = OrderedDict()
        self._done: list[OpenRequest] = []
        self._pools: dict[str, Pool] = {}
        self._members: dict[str, dict[str, str]] = {}
        self._changed: list[tuple[float, str, Pool | None]] = []
        self._unrouted = self._dropped = 0
        self._came = self._blocks_came = 0
        self._behind = False

    def subscribe(self, observations: FanOut) -> None:
        """Subscribe to the observations that make a request's line."""
        observations.subscribe(Accepted, self._accepted)
        observations.subscribe(Routed, self._routed)
        observations.subscribe(Rejected, self._rejected)
        observations.subscribe(Abandoned, self._abandoned)
        observations.subscribe(FirstTokenSeen, self._first_token)
        observations.subscribe(Logged, self._logged)
        observations.subscribe(Ended, self._ended)
        observations.subscribe(Expired, self._expired)
        observations.subscribe(PoolsChanged, self._pools_changed)

    async def run(self) -> None:
        """Hand over a batch every second, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(clock())

    def tick(self, now: float) -> None:
        """Hand the requests that are complete, or ended long ago, to the writer."""
        while self._unlogged:
            request_id, ended = next(iter(self._unlogged.items()))
            if ended.ended_s is not None and ended.ended_s > now - USAGE_S:
                break
            del self._unlogged[request_id]
            self._complete(ended)
        if not (self._done or self._changed or self._unrouted or self._dropped):
            return
        batch = Batch(
            now_s=now + self._offset_s(),
            offset_s=self._offset_s(),
            requests=self._done,
            pools=self._changed,
            unrouted=self._unrouted,
            dropped=self._dropped,
        )
        self._done, self._changed = [], []
        self._unrouted = self._dropped = 0
        self._writer.put(batch)

    async def close(self) -> None:
        """Write all requests, those without an end, too; wait for a few seconds at most."""
        for ended in (*self._unlogged.values(), *self._open.values()):
            self._complete(ended)
        self._unlogged.clear()
        self._open.clear()
        self.tick(asyncio.get_running_loop().time())
        await asyncio.to_thread(self._writer.close, CLOSE_S)

    def _accepted(self, accepted: Accepted) -> None:
        request = accepted.request
        if self._sampled_below is not None and not self._is_sampled(request, self._sampled_below):
            return
        name = accepted.arrival.headers.get(REQUEST_ID, "")
        self._open[request.id] = OpenRequest(accepted.pool, request, name)
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
            self._drop()

    def _is_sampled(self, request: Request, below: int) -> bool:
        """Return whether a request's session, or a request without one, is recorded."""
        hashes = self._writer.hashes
        if hashes is None:
            # The folder was never open.
            return False
        if request.session is None:
            return hashes.text(request.id, Purpose.SAMPLE) < below
        return hashes.one(request.session, Purpose.SAMPLE) < below

    def _routed(self, routed: Routed) -> None:
        request = self._open.get(routed.decision.request_id)
        if request is not None:
            request.receipt = routed.decision.receipt
            request.queued_s = routed.queued_s

    def _rejected(self, rejected: Rejected) -> None:
        request = self._open.pop(rejected.request_id, None)
        if request is not None:
            request.refusal = rejected.refused.code
            request.queued_s = rejected.queued_s
            request.ended_s = rejected.now
            self._complete(request)
        elif not rejected.request_id:
            self._unrouted += 1

    def _abandoned(self, abandoned: Abandoned) -> None:
        request = self._open.pop(abandoned.request_id, None)
        if request is not None:
            request.queued_s = abandoned.queued_s
            request.ended_s = abandoned.now
            self._complete(request)

    def _first_token(self, seen: FirstTokenSeen) -> None:
        request = self._open.get(seen.request_id)
        # The prefill pool's first token is reported, too.
        if request is not None and request.pool == seen.pool:
            request.ttft_s = seen.first_token.ttft_s

    def _logged(self, logged: Logged) -> None:
        request_id = logged.entry.request_id
        request = self._open.pop(request_id, None) or self._unlogged.pop(request_id, None)
        if request is None:
            return
        request.entry = logged.entry
        request.ended_s = request.ended_s or logged.now
        served = logged.entry.served_endpoint
        if served is not None and request.receipt is not None and served != request.receipt.address:
            request.served = self._members.get(request.pool, {}).get(served, served)
        self._complete(request)

    def _ended(self, ended: Ended) -> None:
        request_id = ended.completion.request_id
        request = self._open.pop(request_id, None)
        if request is not None:
            request.ending = ended.ending
            request.ended_s = ended.now
            self._unlogged[request_id] = request

    def _expired(self, expired: Expired) -> None:
        request = self._open.pop(expired.completion.request_id, None)
        if request is not None:
            self._complete(request)

    def _pools_changed(self, changed: PoolsChanged) -> None:
        at_s = round(changed.now + self._offset_s(), 6)
        pools = {pool.id: pool for pool in changed.pools}
        for name, pool in pools.items():
            if self._pools.get(name) != pool:
                self._changed.append((at_s, name, pool))
                self._members[name] = {member.endpoint: member.id for member in pool.members}
        for name in self._pools.keys() - pools.keys():
            self._changed.append((at_s, name, None))
            del self._members[name]
        self._pools = pools

    def _complete(self, ended: OpenRequest) -> None:
        """Add a request to the next batch, or drop it while too many are not written."""
        blocks = len(ended.request.chain.hashes)
        if (
            self._came - self._writer.taken >= UNWRITTEN_MAX
            or self._blocks_came - self._writer.taken_blocks + blocks > UNWRITTEN_BLOCKS_MAX
        ):
            self._drop()
            if not self._behind:
                self._behind = True
                _log.warning("Dropping requests from the recording, the disk is too slow")
            return
        self._behind = False
        self._came += 1
        self._blocks_came += blocks
        self._done.append(ended)

    def _drop(self) -> None:
        self._dropped += 1
        self._writer.metrics.dropped(1)
