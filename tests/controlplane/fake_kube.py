"""A fake ``KubeClient`` for tests, with configured responses to requests and configured watch events."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualmap_edge.kube.client import KubeError, WatchEvent

Answer = dict[str, Any] | KubeError | Callable[["Request"], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = ""


class FakeKube:
    """The client returns the answers in order and repeats the last answer. A request without a configured answer gets
    {}.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.watches: list[Request] = []
        self.watching = asyncio.Event()
        self._answers: defaultdict[tuple[str, str], deque[Answer]] = defaultdict(deque)
        self._events: asyncio.Queue[WatchEvent | KubeError | None] = asyncio.Queue()

    def answer(self, method: str, path: str, *answers: Answer) -> None:
        self._answers[method, path].extend(answers)

    def answer_instead(self, method: str, path: str, *answers: Answer) -> None:
        self._answers[method, path] = deque(answers)

    def event(self, kind: str, body: dict[str, Any]) -> None:
        self._events.put_nowait(WatchEvent(kind, body))

    def break_watch(self, error: KubeError | None) -> None:
        """End the current or the next watch with this error; None ends it like the server's timeout."""
        self._events.put_nowait(error)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> dict[str, Any]:
        request = Request(method=method, path=path, query=dict(query), body=body, content_type=content_type)
        self.requests.append(request)
        answers = self._answers[method, path]
        answer: Answer = {}
        if answers:
            answer = answers.popleft() if len(answers) > 1 else answers[0]
        if isinstance(answer, KubeError):
            raise answer
        return answer(request) if callable(answer) else answer

    async def watch(self, path: str, *, query: Sequence[tuple[str, str]] = (), **_: float) -> AsyncIterator[WatchEvent]:
        self.watches.append(Request(method="WATCH", path=path, query=dict(query)))
        self.watching.set()
        while True:
            event = await self._events.get()
            if event is None:
                return
            if isinstance(event, KubeError):
                raise event
            yield event


class Counts:
    """An ``ApiObserver`` that records its calls."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []

    def api_request(self, verb: str, code: int) -> None:
        self.requests.append((verb, code))


class Clock:
    """A clock that only the test moves."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks cause; the test's timeout limits the wait."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)
