"""A picker with its observer, and helpers to call the picker, for tests."""

from dualmap_extproc.errors import Refused
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from extproc.envoy_messages import Recorder, chat, pool


class Desk:
    """A picker with its observer, and helpers to call the picker."""

    def __init__(self, *pools, limits: Limits | None = None) -> None:
        self.observer = Recorder()
        self.resumed: list[Picked | Refused] = []
        self.picker = Picker(limits or Limits(), self.observer.report, id_prefix="r1")
        self.picker.set_pools(0.0, pools or (pool(),))

    def ask(self, body: bytes = chat(), *, now=10.0, subset=None, headers=None) -> Picked | Refused | AnswerLater:
        return self.picker.pick(now, body, subset, now, headers=headers or {}, resume=self.resumed.append)

    def pick(self, body: bytes = chat(), *, now=10.0) -> Picked:
        picked = self.ask(body, now=now)
        assert isinstance(picked, Picked)
        return picked

    def refused(self, body: bytes) -> int:
        refused = self.ask(body)
        assert isinstance(refused, Refused)
        return refused.status

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)
