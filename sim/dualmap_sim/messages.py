"""The messages between the routers of a simulated cluster, if a pool's owner decides for all of them."""

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from dualmap.ownership.messages import Message, Progress
from dualmap.ownership.owner import owner_of
from dualmap.pools.pool import Pool
from dualmap.requests import Outcome
from dualmap.shared_router import SharedRouter
from dualmap_sim.replication import Replica
from dualmap_sim.timeline import Timeline

LATE_S: Final = 0.05
"""The delay of a late message, which is longer than a router waits for an answer."""
LOSS_NOTICED_S: Final = 1.0
"""The time until the other routers notice that a router is silent, as in production."""


class RouterMessages:
    """The routers of one run, and their messages, which arrive after ``hop_delay_s``, or later.

    A share ``late`` of the messages takes LATE_S. As on a connection, messages between two routers arrive in order, so
    a late message delays the next ones. A router knows all routers that run, and a lost router for LOSS_NOTICED_S more.
    ``after`` is called with a router and its outcomes.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        replicas: Sequence[Replica],
        hop_delay_s: float,
        late: float,
        replicated: bool,
        timeline: Timeline,
        after: Callable[[int, tuple[Outcome, ...]], None],
    ) -> None:
        self._replicas = replicas
        self._hop_delay_s = hop_delay_s
        self._late = late
        self._timeline = timeline
        self._after = after
        self._random = random.Random(0)
        self._arrived_s: dict[tuple[str, str], float] = {}
        self._numbers = {_name(number): number for number in range(len(replicas))}
        self.routers = tuple(
            SharedRouter(pool, name=name, send=self._sender(name), replicated=replicated) for name in self._numbers
        )

    def begin(self) -> None:
        """Schedule the start and the loss of every router."""
        for start_s in sorted({replica.at_s for replica in self._replicas}):
            self._timeline.at(start_s, self._meet, start_s)
        for number, replica in enumerate(self._replicas):
            if replica.lost_s < inf:
                self._timeline.at(replica.lost_s + LOSS_NOTICED_S, self._notice_loss, number, ticks=True)

    def report_orphan(self, lost: int, progress: Progress) -> None:
        """Report a request of a lost router to the routers that run, as soon as they have noticed the loss."""
        at_s = max(self._timeline.now_s, self._replicas[lost].lost_s + LOSS_NOTICED_S)
        self._timeline.at(at_s, self._deliver_orphan, progress, ticks=True)

    def _deliver_orphan(self, progress: Progress) -> None:
        for number in self._running():
            self._after(number, self.routers[number].on_orphan(self._timeline.now_s, progress).outcomes)

    def _running(self) -> list[int]:
        return [number for number, each in enumerate(self._replicas) if each.runs(self._timeline.now_s)]

    def _meet(self, _at_s: float) -> None:
        now = self._timeline.now_s
        names = [_name(n) for n, each in enumerate(self._replicas) if each.at_s <= now < each.lost_s + LOSS_NOTICED_S]
        for number in self._running():
            self._after(number, self.routers[number].on_routers(now, names).outcomes)

    def _notice_loss(self, lost: int) -> None:
        for number in self._running():
            effects = self.routers[number].on_router_lost(self._timeline.now_s, _name(lost))
            self._after(number, effects.outcomes)
        self._meet(self._timeline.now_s)

    def _sender(self, name: str) -> Callable[[str, Message], None]:
        def send(to: str, message: Message) -> None:
            if self._timeline.now_s >= self._replicas[self._numbers[name]].lost_s:
                return
            link = (name, to)
            is_late = self._late > 0.0 and self._random.random() < self._late
            arrives_s = self._timeline.now_s + (LATE_S if is_late else self._hop_delay_s)
            self._arrived_s[link] = max(self._arrived_s.get(link, arrives_s), arrives_s)
            self._timeline.at(self._arrived_s[link], self._deliver, (name, self._numbers[to], message))

        return send

    def _deliver(self, sent: tuple[str, int, Message]) -> None:
        sender, number, message = sent
        if self._replicas[number].runs(self._timeline.now_s):
            effects = self.routers[number].on_message(self._timeline.now_s, sender, message)
            self._after(number, effects.outcomes)


def owner_number(pool: Pool, routers: int) -> int:
    """Return the number of the router that owns the pool, if that number of routers run."""
    names = [_name(number) for number in range(routers)]
    owner = owner_of(pool.id, names)
    assert owner is not None
    return names.index(owner)


def _name(number: int) -> str:
    return f"router-{number}"
