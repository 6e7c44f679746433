"""Several routers of one pool, connected by message queues that a test delivers, delays or cuts."""

from collections import defaultdict, deque
from collections.abc import Collection

from builders import request, text_of
from dualmap.ownership.messages import Message
from dualmap.ownership.missed_answers import ANSWER_TIMEOUT_S, MISSES_MAX
from dualmap.ownership.owner import owner_of
from dualmap.pools.pool import Pool
from dualmap.requests import Asked, Decision, Effects, Outcome, Queued, Rejection, Request, Usage
from dualmap.shared_router import RemoteDecision, SharedRouter

LONG = text_of(4000, "a long prompt")


def at(id: str, text: str = LONG, *, now: float = 0.0):  # type: ignore[no-untyped-def]
    return request(id, text, now=now)


class Routers:
    """The routers ``names`` of a pool. The one that owns the pool is ``owner``; ``others`` are the rest."""

    def __init__(self, pool: Pool, count: int = 2) -> None:
        self.now = 0.0
        self.names = tuple(f"router-{number}" for number in range(count))
        self.running = set(self.names)
        self.links: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        """The outcomes of each request, in the order in which its router returned them."""
        self.results: list[str] = []
        self.asked_at: dict[str, str] = {}
        self.routers = {
            name: SharedRouter(pool, name=name, send=self._sender(name), decided=self._decided) for name in self.names
        }
        self.meet()
        owner = owner_of(pool.id, self.names)
        assert owner is not None
        self.owner = owner
        self.others = tuple(name for name in self.names if name != owner)

    def __getitem__(self, name: str) -> SharedRouter:
        return self.routers[name]

    def meet(self, routers: Collection[str] | None = None) -> None:
        """Tell every running router which routers may own pools: all that run, unless ``routers`` says otherwise."""
        for name in sorted(self.running):
            self.take(self[name].on_routers(self.now, self.running if routers is None else routers))

    def lose(self, name: str) -> None:
        """End a router without notice; the others notice at once."""
        self.running.discard(name)
        for link, messages in self.links.items():
            if name in link:
                messages.clear()
        for other in sorted(self.running):
            self.take(self[other].on_router_lost(self.now, name))
        self.meet()

    def ask(self, name: str, request: Request) -> Decision | Queued | Rejection | Asked:
        """Give a new request to a router, and deliver no message."""
        self.asked_at[request.id] = name
        answer, outcomes = self[name].on_request(self.now, request)
        if not isinstance(answer, Asked):
            self.outcomes[request.id].append(answer)
        self._note(outcomes)
        return answer

    def first_token(self, request_id: str) -> None:
        self.take(self[self.asked_at[request_id]].on_first_token(self.now, request_id))

    def finish(self, request_id: str, usage: Usage | None = None) -> bool:
        completion = self.take(self[self.asked_at[request_id]].on_finished(self.now, request_id, usage))
        return completion is not None

    def take(self, effects: Effects[object]) -> object:
        self._note(effects.outcomes)
        return effects.answer

    def deliver(self) -> None:
        """Deliver all messages, and those that follow from them."""
        while any(self.links.values()):
            for link in tuple(self.links):
                self.deliver_one(link)

    def deliver_one(self, link: tuple[str, str]) -> None:
        if self.links[link]:
            sender, receiver = link
            message = self.links[link].popleft()
            self.take(self[receiver].on_message(self.now, sender, message))

    def wait(self, seconds: float) -> None:
        """Let time pass, with every deadline in it."""
        until_s = self.now + seconds
        while True:
            due = [(due_s, name) for name in sorted(self.running) if (due_s := self[name].next_deadline()) is not None]
            due_s, name = min(due, default=(until_s + 1, ""))
            if due_s > until_s:
                break
            self.now = max(due_s, self.now) + 1e-6
            self.take(self[name].on_deadline(self.now))
        self.now = max(until_s, self.now)

    def wait_for_answer(self) -> None:
        self.wait(ANSWER_TIMEOUT_S + 1e-3)

    def miss(self, name: str, *ids: str) -> None:
        """Ask as many requests in a row as pause the questions, and let each miss its answer."""
        assert len(ids) == MISSES_MAX
        for each in ids:
            answer = self.ask(name, request(each, text_of(1000, each), now=self.now))
            assert isinstance(answer, Asked)
            self.wait_for_answer()

    def in_flight(self, name: str) -> int:
        return sum(each.in_flight for each in self[name].status().endpoints)

    def decision(self, request_id: str) -> Decision:
        last = self.outcomes[request_id][-1]
        assert isinstance(last, Decision), self.outcomes[request_id]
        return last

    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        def send(to: str, message: Message) -> None:
            if name in self.running and to in self.running:
                self.links[name, to].append(message)

        return send

    def _decided(self, decision: RemoteDecision) -> None:
        self.results.append(decision.result)

    def _note(self, outcomes: Collection[Outcome]) -> None:
        for outcome in outcomes:
            self.outcomes[outcome.request_id].append(outcome)
