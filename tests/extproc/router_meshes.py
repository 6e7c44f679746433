"""Several pickers of one process that exchange messages, for tests: messages may be lost, and keep their order."""

from collections import deque
from collections.abc import Callable

from dualmap.ownership.messages import Message
from dualmap.ownership.owner import owner_of
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from extproc.envoy_messages import Recorder, chat, pool

NAMES = ("one-0000aaaa", "two-0000bbbb", "three-0000cccc")


class MeshDesk:
    """A picker that is one of several routers, its observer, and the answers that its streams received."""

    def __init__(self, mesh: "RouterMesh", name: str) -> None:
        self.name = name
        self.observer = Recorder()
        self.resumed: list[Picked | Refused] = []
        self.picker = Picker(
            Limits(),
            self.observer.report,
            id_prefix=name,
            send=lambda pool_id, peer, message: mesh.post(self.name, pool_id, peer, message),
        )

    def ask(self, body: bytes = chat(), *, now: float, headers=None) -> Picked | Refused | AnswerLater:
        return self.picker.pick(now, body, None, now, headers=headers or {}, resume=self.resumed.append)

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())


class RouterMesh:
    """Routers with the same pools. ``deliver`` passes on the messages that are due; ``loses`` says which are lost."""

    def __init__(self, *pools, names: tuple[str, ...] = NAMES, delay_s: float = 0.001) -> None:
        self.pools = pools or (pool(),)
        self.delay_s = delay_s
        self.loses: Callable[[str, str], bool] = lambda _sender, _receiver: False
        self._posted: deque[tuple[float, str, str, str, Message]] = deque()
        self._now = 0.0
        self.desks = {name: MeshDesk(self, name) for name in names}
        for desk in self.desks.values():
            desk.picker.set_pools(0.0, self.pools)
        self.set_routers(0.0, names)

    @property
    def owner(self) -> MeshDesk:
        return self.desks[owner_of(self.pools[0].id, self.desks)]

    @property
    def others(self) -> list[MeshDesk]:
        return [desk for desk in self.desks.values() if desk is not self.owner]

    def set_routers(self, now: float, names) -> None:
        self._now = now
        for desk in self.desks.values():
            desk.picker.on_routers(now, names)

    def post(self, sender: str, pool_id: str, receiver: str, message: Message) -> None:
        if receiver in self.desks and not self.loses(sender, receiver):
            self._posted.append((self._now + self.delay_s, sender, pool_id, receiver, message))

    def deliver(self, now: float) -> None:
        """Deliver all messages, also those that deliveries cause; each takes ``delay_s``."""
        self._now = max(self._now, now)
        while self._posted:
            due_s, sender, pool_id, receiver, message = self._posted.popleft()
            self._now = max(self._now, due_s)
            self.desks[receiver].picker.on_message(self._now, pool_id, sender, message)

    def lose(self, now: float, name: str) -> None:
        """End a router: the others lose it."""
        del self.desks[name]
        self._posted = deque(each for each in self._posted if name not in (each[1], each[3]))
        for desk in self.desks.values():
            desk.picker.on_router_lost(now, name)
        self.set_routers(now, tuple(self.desks))
