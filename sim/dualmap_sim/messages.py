"""The messages between the routers of a simulated cluster, if a pool's owner decides for all of them."""

from collections.abc import Callable, Sequence

from dualmap.ownership.messages import Message
from dualmap.pools.pool import Pool
from dualmap.requests import Outcome
from dualmap.shared_router import SharedRouter
from dualmap_sim.replication import Replica
from dualmap_sim.timeline import Timeline


class RouterMessages:
    """The routers of one run, and their messages, which arrive after ``hop_delay_s``.

    A router knows all routers that have started. ``after`` is called with a router and its outcomes.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        replicas: Sequence[Replica],
        hop_delay_s: float,
        replicated: bool,
        timeline: Timeline,
        after: Callable[[int, tuple[Outcome, ...]], None],
    ) -> None:
        self._replicas = replicas
        self._hop_delay_s = hop_delay_s
        self._timeline = timeline
        self._after = after
        self._numbers = {_name(number): number for number in range(len(replicas))}
        self.routers = tuple(
            SharedRouter(pool, name=name, send=self._sender(name), replicated=replicated) for name in self._numbers
        )

    def begin(self) -> None:
        """Schedule the start of every router."""
        for start_s in sorted({replica.at_s for replica in self._replicas}):
            self._timeline.at(start_s, self._started, start_s)

    def _started(self, at_s: float) -> None:
        running = [number for number, replica in enumerate(self._replicas) if replica.at_s <= at_s]
        names = [_name(number) for number in running]
        for number in running:
            self._after(number, self.routers[number].on_routers(self._timeline.now_s, names).outcomes)

    def _sender(self, name: str) -> Callable[[str, Message], None]:
        def send(to: str, message: Message) -> None:
            self._timeline.at(
                self._timeline.now_s + self._hop_delay_s, self._deliver, (name, self._numbers[to], message)
            )

        return send

    def _deliver(self, sent: tuple[str, int, Message]) -> None:
        sender, number, message = sent
        effects = self.routers[number].on_message(self._timeline.now_s, sender, message)
        self._after(number, effects.outcomes)


def _name(number: int) -> str:
    return f"router-{number}"
