"""The routers of a simulated cluster as subscribers to its engines' KV events.

As in production (``dualmap_extproc.engines.kv_events``), each router follows each member with core's state machine of
an event source. Messages arrive late but complete, so routers request no replay. A restarted engine begins at number 0;
a router notices the restart with the first message after it.
"""

from collections.abc import Sequence
from math import inf

from dualmap.engines.events import Batch
from dualmap.engines.residency import KvChange
from dualmap.engines.source import Apply, EventSource, Message
from dualmap.shared_router import Router
from dualmap_sim.block_pool import EventBatch
from dualmap_sim.timeline import Timeline

_RANK = 0


class KvSubscriptions:
    """The subscriptions of all routers. A router that joins later receives the earlier messages as well."""

    def __init__(self, routers: Sequence[Router], timeline: Timeline, *, delay_s: float) -> None:
        self._routers = routers
        self._timeline = timeline
        self._delay_s = delay_s
        # All routers receive the same messages at the same time, so one source for each member stands for all routers.
        self._sources: dict[str, EventSource] = {}

    def publish(self, member: str, batch: EventBatch) -> None:
        """Send the events of a step of a member's engine to every router."""
        self._timeline.at(self._timeline.now_s + self._delay_s, self._deliver, (member, batch))

    def _deliver(self, published: tuple[str, EventBatch]) -> None:
        member, batch = published
        source = self._sources.get(member)
        if source is None:
            source = self._sources[member] = EventSource(replays=False)
            source.start(-inf)
        # The events of the message are not packed.
        message = Message(batch.number, b"")
        effects = source.on_live(self._timeline.now_s, message)
        changes: list[KvChange] = [Batch(events=batch.events) if isinstance(each, Apply) else each for each in effects]
        for router in self._routers:
            router.on_kv_events(member, _RANK, changes, source.status)
