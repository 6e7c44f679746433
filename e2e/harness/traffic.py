"""Steady load through Envoy: a fixed number of concurrent streamed and plain requests, with their outcomes.

A fault test marks a moment, injects a fault, and counts outcomes: for requests that were open at that moment, and for
later requests.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from harness.deployment import CHAT
from harness.upstream import ENGINE_HEADER
from harness.waiting import until

END_OF_STREAM = b"data: [DONE]\n\n"
# A client waits for this time after a rejected request.
RETRY_PAUSE_S = 0.05
PATIENCE_S = 30.0
# If a request takes longer than this, the client also starts its next request, so that hung requests do not reduce the
# load.
NEXT_AFTER_S = 3.0


class Kind(StrEnum):
    """The form of a request's response."""

    STREAM = "stream"
    PLAIN = "plain"


class Outcome(StrEnum):
    """A request's outcome at its client."""

    OK = "ok"
    REFUSED = "refused"
    """An error status, with a body."""
    CUT = "cut"
    """A status of 200 and an incomplete response."""
    LOST = "lost"
    """No status: the connection failed."""
    STUCK = "stuck"
    """No response until the test's timeout."""


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request at its client.

    ``outcome`` is None while the request is open; ``began`` is true after the first byte of the body.
    """

    kind: Kind
    number: int
    started_s: float
    outcome: Outcome | None = None
    status: int = 0
    began: bool = False
    routed: bool = False
    engine: str = ""
    error: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Incident:
    """The requests around a fault: ``caught`` were open at the fault, and ``later`` started after the fault."""

    _exchanges: list[Exchange]
    _mark: int
    caught: list[Exchange]

    @property
    def later(self) -> list[Exchange]:
        """Requests started after the fault."""
        return self._exchanges[self._mark :]

    @property
    def everyone(self) -> list[Exchange]:
        """Both the caught and the later requests."""
        return [*self.caught, *self.later]

    def report(self, fault: str) -> None:
        """Print the numbers for docs/operations.md; ``pytest -rP`` shows them."""
        unrouted = sum(not each.routed for each in self.later if each.status == 200)
        slowest_s = max(each.took_s for each in self.everyone)
        print(
            f"{fault}: caught {dict(tally(self.caught))}, later {dict(tally(self.later))},"
            f" {unrouted} not routed, slowest {slowest_s:.1f} s"
        )


Body = Callable[[int], Mapping[str, Any]]
Headers = Callable[[int], Mapping[str, str]]


class Traffic:
    """Clients that send requests without a pause.

    ``body`` returns the body of a request by its number, and ``headers`` its additional headers; ``url`` returns
    Envoy's address.
    """

    def __init__(
        self,
        url: Callable[[], str],
        body: Body,
        *,
        streams: int = 8,
        plain: int = 4,
        headers: Headers = lambda number: {},
    ) -> None:
        self._url = url
        self._body = body
        self._headers = headers
        self._clients = {Kind.STREAM: streams, Kind.PLAIN: plain}
        self._stop = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self.exchanges: list[Exchange] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests while the context is open, then wait for the open requests; a request without an end is
        ``STUCK``.
        """
        self._stop.clear()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = [
                asyncio.create_task(self._client(session, kind))
                for kind, count in self._clients.items()
                for _ in range(count)
            ]
            try:
                yield
                self._stop.set()
                await asyncio.wait((*clients, *self._asking), timeout=PATIENCE_S)
            finally:
                self._stop.set()
                tasks = [*clients, *self._asking]
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in results if isinstance(each, Exception)] == []

    @property
    def open(self) -> list[Exchange]:
        """The requests that have not ended."""
        return [each for each in self.exchanges if each.outcome is None]

    def incident(self) -> Incident:
        """Mark the moment of a fault."""
        return Incident(self.exchanges, len(self.exchanges), self.open)

    async def flowing(self, requests: int = 24, *, timeout_s: float = 60.0) -> None:
        """Wait until ``requests`` requests that start after this call have succeeded."""
        mark = len(self.exchanges)

        async def answered() -> bool:
            return sum(each.outcome is Outcome.OK for each in self.exchanges[mark:]) >= requests

        await until(answered, f"{requests} more requests are answered", timeout_s=timeout_s)

    async def streaming(self, streams: int) -> None:
        """Wait until ``streams`` open streams have received a first token."""

        async def begun() -> bool:
            return sum(each.began for each in self.open) >= streams

        await until(begun, f"{streams} streams are under way", timeout_s=PATIENCE_S)

    async def _client(self, session: aiohttp.ClientSession, kind: Kind) -> None:
        """Send requests one after the other; a slow request continues beside the next request."""
        while not self._stop.is_set():
            number = len(self.exchanges)
            exchange = Exchange(kind=kind, number=number, started_s=asyncio.get_running_loop().time())
            self.exchanges.append(exchange)
            asking = asyncio.create_task(self._watch(session, exchange))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            await asyncio.wait((asking,), timeout=NEXT_AFTER_S)
            if exchange.outcome is not Outcome.OK:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _watch(self, session: aiohttp.ClientSession, exchange: Exchange) -> None:
        try:
            await self._ask(session, exchange)
        except aiohttp.ClientError as error:
            exchange.outcome = Outcome.CUT if exchange.status else Outcome.LOST
            exchange.error = repr(error)
        except asyncio.CancelledError:
            exchange.outcome = Outcome.STUCK
            raise
        finally:
            exchange.took_s = asyncio.get_running_loop().time() - exchange.started_s

    async def _ask(self, session: aiohttp.ClientSession, exchange: Exchange) -> None:
        body = {**self._body(exchange.number), "stream": exchange.kind is Kind.STREAM}
        headers = self._headers(exchange.number)
        async with session.post(self._url() + CHAT, json=body, headers=headers) as response:
            exchange.status = response.status
            exchange.routed = "x-dualmap-decision" in response.headers
            exchange.engine = response.headers.get(ENGINE_HEADER, "")
            last = b""
            async for chunk in response.content.iter_any():
                exchange.began = True
                last = (last + chunk)[-4096:]
            if response.status != 200:
                exchange.outcome, exchange.error = Outcome.REFUSED, last.decode("utf-8", "replace")
            elif _whole(exchange.kind, last):
                exchange.outcome = Outcome.OK
            else:
                exchange.outcome = Outcome.CUT


def tally(exchanges: list[Exchange]) -> Counter[str]:
    """Count requests by outcome: ``ok``, ``cut``..., and rejected requests by status (``503``)."""
    return Counter(_name(each) for each in exchanges)


def failed(exchanges: list[Exchange]) -> list[Exchange]:
    """Return the requests that ended without a complete response."""
    return [each for each in exchanges if each.outcome not in (None, Outcome.OK)]


def _name(exchange: Exchange) -> str:
    if exchange.outcome is Outcome.REFUSED:
        return str(exchange.status)
    return "open" if exchange.outcome is None else exchange.outcome.value


def _whole(kind: Kind, last: bytes) -> bool:
    if kind is Kind.STREAM:
        return last.endswith(END_OF_STREAM)
    try:
        json.loads(last)
    except ValueError:
        # Keep only the end of a long response.
        return last.rstrip().endswith(b"}")
    return True
