"""The proxy's handler: passes a request to the engine, and before that lets a prefiller compute its prompt.

Every answer of the engine passes as a stream. ``prefill.py`` has the leg to the prefillers. Both legs run in the task
of the client's request, which the server cancels if the client goes away.
"""

import io
import uuid
from collections.abc import AsyncIterable
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_sidecar import messages
from dualmap_sidecar.bodies import Bodies
from dualmap_sidecar.continuation import Continuation
from dualmap_sidecar.continuing import ContinuedLeg, Continuer
from dualmap_sidecar.errors import Refused, UnreadableBody
from dualmap_sidecar.json_object import JsonObject
from dualmap_sidecar.messages import EngineAnswer
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.outcomes import Reason, Where
from dualmap_sidecar.prefill import Prefilled, Prefillers, PrefillLeg, decode_body
from dualmap_sidecar.settings import Limits
from dualmap_sidecar.targets import (
    CONTINUE_HEADER,
    PREFILLER_HEADER,
    PREFILLERS_HEADER,
    Allowed,
    Named,
    read_prefillers,
    read_targets,
)

GENERATIONS: Final = ("/v1/completions", "/v1/chat/completions")
"""The paths whose prompts other engines prefill."""

_ERROR_EVENT: Final = b'data: {"error"'
"""How vLLM begins a stream that has failed before its first token."""
_log = get_logger(__name__)


class Proxy:
    """The handler of all requests for one engine at the base URL ``engine``."""

    def __init__(
        self,
        engine: str,
        session: aiohttp.ClientSession,
        prefillers: Prefillers,
        *,
        allowed: Allowed,
        metrics: SidecarMetrics,
        limits: Limits,
        continuer: Continuer,
        continue_tokens: int | None,
        left_out: OncePerMinute,
    ) -> None:
        self._engine = engine
        self._session = session
        self._prefillers = prefillers
        self._allowed = allowed
        self._metrics = metrics
        self._bodies = Bodies(limits)
        self._continuer = continuer
        self._continue_tokens = continue_tokens
        self._left_out = left_out
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            answer, leg = await self._answer(request)
        except Refused as error:
            return messages.refusal(error)
        # From here on, only a stream that can be continued keeps the request's body, which may be much larger.
        try:
            if leg is None or not answer.is_stream:
                return await _relay(request, answer)
            with self._bodies.kept(leg.continuation.size):
                return await self._continuer.relay(request, answer, leg)
        finally:
            answer.close()

    async def _answer(self, request: web.BaseRequest) -> tuple[EngineAnswer, ContinuedLeg | None]:
        """Return the answer when its head has arrived, and how to continue it if possible. Raises Refused."""
        path = request.raw_path
        if not path.startswith("/"):
            raise Refused(400, "invalid_request", "the request target is not a path; give /PATH")
        await _accept_expectation(request)
        headers = messages.forwarded(request.headers)
        _check_type(request)
        if request.method != "POST" or request.content_type.startswith("multipart/"):
            stream = request.content.iter_any() if request.body_exists else None
            return await self._ask_engine(request.method, path, headers, stream), None
        headers.popall("Content-Length", None)
        async with self._bodies.whole(request) as body:
            return await self._post(request, headers, body)

    async def _post(
        self, request: web.BaseRequest, headers: "CIMultiDict[str]", body: bytes
    ) -> tuple[EngineAnswer, ContinuedLeg | None]:
        """Answer a POST request, whose body must not say from where the engine pulls KV."""
        path = request.raw_path
        try:
            document = JsonObject.parse(body)
        except UnreadableBody as error:
            if error.too_large:
                raise Refused(400, "invalid_request", str(error)) from error
            # The engine rejects the body, unless the path takes something else than JSON.
            return await self._ask_engine("POST", path, headers, body), None
        if request.path not in GENERATIONS:
            return await self._ask_engine("POST", path, headers, decode_body(document, None)), None
        leg = self._continued_leg(request, headers, document)
        if leg is not None:
            document = leg.continuation.first_document
        return await self._generate(request, headers, document), leg

    async def _generate(
        self, request: web.BaseRequest, headers: "CIMultiDict[str]", document: JsonObject
    ) -> EngineAnswer:
        """Answer a request whose prompt a prefiller may compute."""
        path = request.raw_path
        prefilled = await self._prefill(request, headers, document)
        if prefilled.parameters is not None:
            with_kv = decode_body(document, prefilled.parameters)
            answer = await self._ask_engine("POST", path, headers, with_kv, where=prefilled.where)
            if await answer.has_begun(_is_failure):
                self._metrics.prefilled(prefilled.where)
                return answer
            answer.close()
            self._metrics.prefill_failed(Reason.NOT_LOADED)
            _log.warning("Engine could not load the KV of a prefiller, computing the prompt")
            prefilled = Prefilled(where=Where.LOCAL)
        self._metrics.prefilled(prefilled.where)
        if prefilled.rejection is not None:
            return prefilled.rejection
        return await self._ask_engine("POST", path, headers, decode_body(document, None), where=prefilled.where)

    async def _prefill(self, request: web.BaseRequest, headers: "CIMultiDict[str]", document: JsonObject) -> Prefilled:
        named = self._named(request)
        if not named.targets:
            return Prefilled(where=Where.NONE)
        # Both engines log the request under one name.
        headers.setdefault(messages.REQUEST_ID_HEADER, uuid.uuid4().hex)
        leg = PrefillLeg(path=request.raw_path, headers=headers, document=document)
        return await self._prefillers.prefill(leg, named.targets)

    def _named(self, request: web.BaseRequest) -> Named:
        single = request.headers.getall(PREFILLER_HEADER, [])
        return self._reported(read_prefillers(single, request.headers.getall(PREFILLERS_HEADER, []), self._allowed))

    def _reported(self, named: Named) -> Named:
        """Count and log the members that are left out."""
        if named.left_out:
            self._metrics.prefill_failed(Reason.REFUSED_TARGET, named.left_out)
            self._left_out.warn(named.left_out, accepted="IP:PORT of --pool, --allow or --kube")
        return named

    def _continued_leg(
        self, request: web.BaseRequest, headers: "CIMultiDict[str]", document: JsonObject
    ) -> ContinuedLeg | None:
        """Return how to continue the request's stream, None if that is not possible."""
        values = request.headers.getall(CONTINUE_HEADER, [])
        if self._continue_tokens is None or not values:
            return None
        targets = self._reported(read_targets(values, self._allowed)).targets
        chat = request.path == GENERATIONS[1]
        wanted = JsonObject.parse(decode_body(document, None))
        continuation = Continuation.of(wanted, chat=chat, tokens_max=self._continue_tokens)
        if continuation is None or not targets:
            return None
        headers.popall("Accept-Encoding", None)
        return ContinuedLeg(continuation=continuation, path=request.raw_path, headers=headers, targets=targets)

    async def _ask_engine(
        self,
        method: str,
        path: str,
        headers: "CIMultiDict[str]",
        body: bytes | AsyncIterable[bytes] | None,
        *,
        where: Where | None = None,
    ) -> EngineAnswer:
        """Return the head of the engine's answer. Raises Refused if the engine does not answer."""
        url = URL(self._engine + path, encoded=True)
        # aiohttp sends a file in pieces. A long text in one piece would stop the event loop.
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        try:
            response = await self._session.request(
                method, url, headers=headers, data=data, allow_redirects=False, timeout=self._timeout
            )
        except (aiohttp.ClientError, OSError) as error:
            # With 503, a gateway sends the request to another member.
            raise Refused(503, "engine_unavailable", "the engine does not answer") from error
        return EngineAnswer.of(response, where)


def _check_type(request: web.BaseRequest) -> None:
    """Raise Refused for a completion whose body could hide from where the engine pulls KV."""
    if request.method != "POST" or request.path not in GENERATIONS:
        return
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refused(
            415, "unsupported_media_type", f"Content-Encoding {encoding[:50]!r} is not accepted; send plain JSON"
        )
    if request.content_type.startswith("multipart/"):
        raise Refused(415, "unsupported_media_type", "multipart bodies are not accepted here; send application/json")


async def _accept_expectation(request: web.BaseRequest) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def _is_failure(status: int, first: bytes) -> bool:
    """Return whether an answer to a request with KV from a prefiller says that the KV was not loaded.

    vLLM with ``kv_load_failure_policy: fail`` then answers 500, or ends the stream with an error. No byte has been sent
    to the client, so the request can be repeated.
    """
    return status == 500 or first.startswith(_ERROR_EVENT)


async def _relay(request: web.BaseRequest, answer: EngineAnswer) -> web.StreamResponse:
    """Send an answer to the client, piece by piece."""
    response = answer.head()
    await response.prepare(request)
    try:
        async for piece in answer.pieces():
            await response.write(piece)
    except (aiohttp.ClientError, OSError):
        # The answer is cut, or the client is gone. A regular end would hide the cut from the client.
        if request.transport is not None:
            request.transport.close()
    return response
