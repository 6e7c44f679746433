"""Streams that survive the end of their engine: the rest comes from another member, within one answer to the client."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from dualmap_edge.logs import get_logger
from dualmap_sidecar.continuation import (
    DONE,
    EVENT_BYTES_MAX,
    INTERRUPTED,
    Continuation,
    Events,
    EventTooLong,
)
from dualmap_sidecar.messages import EngineAnswer, for_prefiller
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.outcomes import Continued
from dualmap_sidecar.settings import Settings
from dualmap_sidecar.targets import Target

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedLeg:
    """A stream that can be continued: its state, the request's path and headers, and the members to ask in order."""

    continuation: Continuation
    path: str
    headers: "CIMultiDict[str]"
    targets: Sequence[Target]


class Continuer:
    """Sends streams to clients, and asks other members for the rest of a stream that breaks."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, metrics: SidecarMetrics) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.limits.connect_s)
        self._head_s = settings.prefill_timeout_s
        self._metrics = metrics

    async def relay(self, request: web.BaseRequest, answer: EngineAnswer, leg: ContinuedLeg) -> web.StreamResponse:
        """Send a stream to the client until its end."""
        response = answer.head()
        # The proxy changes the usage in the stream.
        response.headers.popall("Content-Length", None)
        await response.prepare(request)
        state, left = leg.continuation, list(leg.targets)
        await _copy(answer, response, state)
        while not state.ended:
            if state.complete:
                await response.write(state.end())
                break
            target = left.pop(0) if left and state.possible else None
            if target is None:
                self._metrics.continued(Continued.NO_MEMBER if state.possible else Continued.NOT_POSSIBLE)
                await response.write(INTERRUPTED + DONE)
                break
            await self._continue(response, leg, target)
        return response

    async def _continue(self, response: web.StreamResponse, leg: ContinuedLeg, target: Target) -> None:
        """Send the rest of a stream from another member, as far as that member generates it."""
        state = leg.continuation
        url = URL(f"http://{target}{leg.path}", encoded=True)
        _log.warning("Continuing a stream whose engine ended", member=str(target), tokens=state.tokens)
        body = io.BytesIO(state.next_body())
        headers = for_prefiller(leg.headers)
        try:
            async with asyncio.timeout(self._head_s):
                rest = await self._session.post(
                    url, data=body, headers=headers, allow_redirects=False, timeout=self._timeout
                )
        except (aiohttp.ClientError, OSError):
            self._metrics.continued(Continued.MEMBER_FAILED)
            return
        try:
            if rest.status != 200:
                self._metrics.continued(Continued.MEMBER_FAILED)
                return
            await _copy(EngineAnswer.of(rest, None), response, state)
            self._metrics.continued(Continued.CONTINUED if state.ended else Continued.MEMBER_FAILED)
        finally:
            rest.release()


async def _copy(answer: EngineAnswer, response: web.StreamResponse, state: Continuation) -> None:
    """Send the events of an engine's stream to the client, until the stream ends or breaks."""
    async for event in _events(answer):
        sent = state.take(event)
        if sent:
            await response.write(sent)


async def _events(answer: EngineAnswer) -> AsyncIterator[bytes]:
    """Yield the complete events of an engine's stream, until the stream ends or breaks, or an event is too long."""
    events = Events()
    try:
        async for piece in answer.pieces():
            for event in events.split(piece):
                yield event
    except (aiohttp.ClientError, OSError):
        return
    except EventTooLong:
        _log.warning("Ending an engine's stream with an event that is too long", longest_bytes=EVENT_BYTES_MAX)
