"""The simulated engine's HTTP server: vLLM's endpoints, answered at the speed of the engine model.

As in vLLM, response headers leave when a request is accepted, and the first body chunk leaves with the first token. A
client that disconnects aborts its request, and ``/metrics`` uses vLLM's metric names. Unlike vLLM, the server accepts
prompts of any length. The server computes only the first tokens, up to the preset's limit, as the DualMap paper does
with its traces. Two response headers are for tests. ``x-engine`` identifies the instance. ``x-request-sha256`` is the
digest of the received request body, which shows whether a proxy changed the body.

``openai_api.py`` and ``openai_answers.py`` define the format of bodies. ``engine_driver.py`` provides the timing, and
``engine_server.py`` the command and the signals. Only this module uses aiohttp.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dualmap.prompts.blocks import BYTES_PER_TOKEN, BlockChain, chain_blocks, chain_root
from dualmap_sim import kv_handover, openai_answers, openai_api, tokenizer
from dualmap_sim.block_pool import BlockPool
from dualmap_sim.engine import Engine, EngineRequest
from dualmap_sim.engine_driver import EngineDriver, Generation
from dualmap_sim.engine_requests import Content
from dualmap_sim.errors import ApiError, KvNotPulled
from dualmap_sim.kv_handover import KvHandover
from dualmap_sim.kv_publisher import KvPublisher
from dualmap_sim.kv_transfer import RemoteKv, Transfer, read_transfer
from dualmap_sim.metrics import EngineMetrics
from dualmap_sim.openai_answers import Answer
from dualmap_sim.openai_api import Call
from dualmap_sim.server_settings import ServerSettings

BODY_BYTES_MAX: Final = 128 * 1024 * 1024
"""The limit exceeds the largest body of a test (64 MB), because the router and Envoy enforce their own limits."""
KEEPALIVE_S: Final = 5.0
"""Seconds an idle connection stays open, as in vLLM (uvicorn's default). A proxy must close its side earlier."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DIGEST: Final = web.RequestKey("x-request-sha256", str)


class EngineHttpServer:
    """One simulated engine behind a listening socket. Create and use the server on one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._engine_name = ""
        self._created_s = int(time.time())
        self._numbers = count(1)
        config, events = settings.config, settings.kv_events
        self._publisher: KvPublisher | None = None
        if events is not None:
            self._publisher = KvPublisher(events, host=settings.host, adapters=settings.adapters)
        pool = (
            None
            if events is None
            else BlockPool(config.cache_tokens // config.block_tokens, block_tokens=config.block_tokens)
        )
        self._engine = engine = Engine(config, cache=pool)
        self._asleep = False
        metrics = EngineMetrics(engine, model=settings.model, speed=settings.speed, asleep=lambda: self._asleep)
        publish = None if self._publisher is None else self._publisher.publish
        self._driver = EngineDriver(engine, metrics, speed=settings.speed, publish=publish)
        self._handover: KvHandover | None = None
        if settings.kv_transfer is not None:
            self._handover = KvHandover(
                settings.kv_transfer,
                speed=settings.speed,
                block_tokens=config.block_tokens,
                release=self._driver.release_kv,
                match=engine.cache.match,
            )
        self._unanswered = 0
        self._draining = False
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._runner = web.AppRunner(
            self._app(),
            access_log=None,
            logger=_logger(),
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=1.0,
        )
        self._site: web.TCPSite | None = None

    async def start(self) -> str:
        """Listen on the configured address; return the bound ``host:port``. Raises OSError or CannotPublish."""
        if self._publisher is not None:
            self._publisher.start()
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=1024)
        await self._site.start()
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self._engine_name = f"{host}:{self._runner.addresses[0][1]}"
        return self._engine_name

    @property
    def kv_endpoints(self) -> tuple[str, str] | None:
        """The addresses of live and replayed KV events, None without KV events."""
        return None if self._publisher is None else (self._publisher.endpoint, self._publisher.replay_endpoint)

    async def drain(self) -> None:
        """Stop listening, reject new requests on open connections, and wait for the accepted requests."""
        self._draining = True
        assert self._site is not None
        await self._site.stop()
        await self._all_answered.wait()

    async def close(self) -> None:
        """Close every connection, which aborts the unanswered requests."""
        await self._runner.cleanup()
        if self._handover is not None:
            await self._handover.close()
        if self._publisher is not None:
            await self._publisher.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._around])
        app.on_response_prepare.append(self._sign)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_page)
        if self._handover is not None:
            app.router.add_post(kv_handover.PATH, self._handover.hand_over)
            app.router.add_post(kv_handover.CACHE_PATH, self._handover.hand_over_cached)
        app.router.add_get("/kv_event_sources", self._kv_event_sources)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/health", self._health)
        return app

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the test headers to a response before it is sent."""
        response.headers["x-engine"] = self._engine_name
        if _DIGEST in request:
            response.headers["x-request-sha256"] = request[_DIGEST]

    @web.middleware
    async def _around(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Accept or reject a request, and convert every error to OpenAI's format."""
        if self._draining and request.method == "POST":
            refusal = _refuse(ApiError(503, "ServiceUnavailable", "the engine is shutting down"))
            refusal.force_close()
            return refusal
        self._unanswered += 1
        self._all_answered.clear()
        try:
            if request.path.startswith("/v1/"):
                self._check_key(request)
            return await handler(request)
        except ApiError as error:
            return _refuse(error)
        except web.HTTPException as error:
            return _refuse(ApiError(error.status, error.reason.title().replace(" ", ""), error.reason))
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._all_answered.set()

    def _check_key(self, request: web.Request) -> None:
        key = self._settings.api_key
        if key is None:
            return
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + key.encode()):
            raise ApiError(401, "Unauthorized", "the Authorization header does not carry this engine's API key")

    async def _body(self, request: web.Request) -> dict[str, object]:
        raw = await request.read()
        request[_DIGEST] = hashlib.sha256(raw).hexdigest()
        body = openai_api.parse_body(raw)
        openai_api.check_model(body, (self._settings.model, *self._settings.adapters))
        if self._asleep:
            raise ApiError(503, "ServiceUnavailable", "the engine is asleep")
        return body

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await self._body(request), chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await self._body(request), chat=False)

    async def _generate(self, request: web.Request, body: Mapping[str, object], *, chat: bool) -> web.StreamResponse:
        config, call = self._settings.config, openai_api.read_call(body, chat=chat)
        adapter = self._adapter(body)
        chain = self._chain(call.prompt, call.cache_salt, adapter)
        output_tokens = call.output_tokens(room_tokens=self._engine.memory_tokens - chain.tokens)
        finish_reason = call.finish_reason
        if config.decode is None:
            output_tokens, finish_reason = 1, "length"
        number = str(next(self._numbers))
        name = request.headers.get("X-Request-Id", number).encode("ascii", "replace").decode()
        answer = Answer(
            chat=call.chat,
            answer_id=("chatcmpl-" if call.chat else "cmpl-") + name,
            created_s=int(time.time()),
            model=adapter or self._settings.model,
            start=chain.hashes[-1],
            prompt_tokens=chain.tokens,
            output_tokens=output_tokens,
            finish_reason=finish_reason,
        )
        work = self._engine_request(
            number, chain, call.prompt, output_tokens, cache_salt=call.cache_salt, adapter=adapter
        )
        transfer = Transfer() if self._handover is None else read_transfer(body)
        work = replace(work, keeps_kv=transfer.remote_decode)
        stream: web.StreamResponse | None = None
        if transfer.remote_prefill is not None:
            stream = await _open_stream(request) if call.stream else None
            pulled = await self._pull(work, transfer.remote_prefill, stream)
            if pulled is None:
                assert stream is not None
                return stream
            work = pulled
        elif self._handover is not None and (source := request.headers.get(kv_handover.SOURCE_HEADER)):
            work = await self._pull_cached(work, source)
        generation = self._driver.start(work, stream=call.stream, finish_reason=finish_reason)
        try:
            if call.stream:
                stream = stream or await _open_stream(request)
                return await _stream(stream, answer, generation, call)
            while not generation.finished:
                await generation.changed()
            kept = None
            if transfer.remote_decode and self._handover is not None:
                kept = self._handover.keep(request, work, answer.answer_id)
            return _json(answer.whole(cached_tokens=generation.reused_tokens, kv_transfer_params=kept))
        finally:
            self._driver.stop(generation)

    async def _pull(
        self, work: EngineRequest, remote: RemoteKv, stream: web.StreamResponse | None
    ) -> EngineRequest | None:
        """Return the request with the KV that was pulled, None if the stream has ended with an error.

        Raises ApiError for a request that does not stream.
        """
        assert self._handover is not None
        missing = work.prompt_tokens - self._engine.cached_tokens(work)
        try:
            await self._handover.pull(remote, missing)
        except KvNotPulled:
            if self._handover.recomputes:
                return work
            error = ApiError(500, "InternalServerError", "Internal server error")
            if stream is None:
                raise error from None
            await stream.write(b"data: " + openai_answers.error_body(error) + b"\n\n" + openai_answers.DONE)
            await stream.write_eof()
            return None
        return replace(work, pulled_tokens=work.prompt_tokens)

    async def _pull_cached(self, work: EngineRequest, source: str) -> EngineRequest:
        """Return the request with what another engine's cache holds of its prompt; compute it if the pull fails."""
        assert self._handover is not None
        whole = (work.prompt_tokens - 1) // self._settings.config.block_tokens
        try:
            tokens = await self._handover.pull_cached(
                source, work.blocks[:whole], cached_tokens=self._engine.cached_tokens(work)
            )
        except KvNotPulled:
            return work
        return replace(work, pulled_tokens=tokens)

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        inputs = openai_api.embedding_inputs(await self._body(request))
        prompt = b"".join(inputs)
        chain = self._chain(prompt, "")
        work = self._engine_request(str(next(self._numbers)), chain, prompt, 1)
        generation = self._driver.start(work, stream=False, finish_reason="stop")
        try:
            while not generation.finished:
                await generation.changed()
        finally:
            self._driver.stop(generation)
        return _json(openai_answers.embeddings(inputs, model=self._settings.model, prompt_tokens=chain.tokens))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = openai_api.chat_prompt(body) if "messages" in body else openai_api.text_prompt(body, "prompt")
        tokens = tokenizer.unpack(tokenizer.encode(prompt))
        return _json(openai_answers.tokens(tokens, max_model_len=self._settings.config.input_tokens_max))

    async def _render_chat(self, request: web.Request) -> web.StreamResponse:
        return self._render(await self._body(request), chat=True)

    async def _render_completion(self, request: web.Request) -> web.StreamResponse:
        return self._render(await self._body(request), chat=False)

    def _render(self, body: Mapping[str, object], *, chat: bool) -> web.StreamResponse:
        """Return the token ids that the engine would compute for a request."""
        call = openai_api.read_call(body, chat=chat)
        return _json(
            openai_answers.rendered(
                tokenizer.unpack(self._encode(call.prompt)),
                request_id=("chatcmpl-" if chat else "cmpl-") + str(next(self._numbers)),
                model=self._adapter(body) or self._settings.model,
                cache_salt=call.cache_salt,
                as_list=not chat,
            )
        )

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return _json(
            openai_answers.models(
                self._settings.model,
                self._settings.adapters,
                created_s=self._created_s,
                max_model_len=self._settings.config.input_tokens_max,
            )
        )

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": f"{version('dualmap')}+sim"})

    async def _kv_event_sources(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({} if self._publisher is None else self._publisher.sources)

    async def _reset_prefix_cache(self, _request: web.Request) -> web.StreamResponse:
        self._engine.reset_cache()
        return web.Response()

    async def _sleep(self, _request: web.Request) -> web.StreamResponse:
        self._asleep = True
        if self._publisher is not None:
            self._engine.reset_cache()
        return web.Response()

    async def _wake_up(self, _request: web.Request) -> web.StreamResponse:
        self._asleep = False
        return web.Response()

    async def _metrics_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._driver.scrape(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self._draining else 200)

    def _adapter(self, body: Mapping[str, object]) -> str:
        """Return the adapter that a request names as its model, or the empty string."""
        return str(body["model"]) if body.get("model") in self._settings.adapters else ""

    def _encode(self, prompt: bytes) -> bytes:
        """Return the packed ids of the tokens that the engine computes."""
        return tokenizer.encode(prompt, tokens_max=self._settings.config.input_tokens_max)

    def _chain(self, prompt: bytes, cache_salt: str, adapter: str = "") -> BlockChain:
        config = self._settings.config
        return chain_blocks(
            prompt[: config.input_tokens_max * BYTES_PER_TOKEN],
            root=chain_root(model=self._settings.model, lora=adapter, cache_salt=cache_salt),
            block_tokens=config.block_tokens,
        )

    def _engine_request(
        self,
        number: str,
        chain: BlockChain,
        prompt: bytes,
        output_tokens: int,
        *,
        cache_salt: str = "",
        adapter: str = "",
    ) -> EngineRequest:
        """Return the request for the engine; with KV events, it contains the token ids of prompt and answer."""
        content, blocks = None, chain.hashes
        if self._publisher is not None:
            tokens = self._encode(prompt) + openai_answers.output_text(chain.hashes[-1], output_tokens)
            content = Content(tokens=tokens, adapter=adapter, cache_salt=cache_salt)
            root = chain_root(model=self._settings.model, lora=adapter, cache_salt=cache_salt)
            blocks = chain_blocks(tokens, root=root, block_tokens=chain.block_tokens).cacheable
        return EngineRequest(
            request_id=number,
            prompt_tokens=chain.tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            content=content,
        )


async def _open_stream(request: web.Request) -> web.StreamResponse:
    """Send the head of a stream, which leaves when the engine accepts the request."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _stream(
    response: web.StreamResponse, answer: Answer, generation: Generation, call: Call
) -> web.StreamResponse:
    """Stream an answer. All tokens between two wake-ups go out in one chunk."""
    sent = 0
    while not generation.finished:
        await generation.changed()
        chunk = answer.opening_chunk() if not sent else b""
        tokens = generation.tokens
        if tokens > sent:
            chunk += answer.text_chunk(sent, tokens, with_usage=call.continuous_usage)
            sent = tokens
        if generation.finished:
            if call.include_usage:
                chunk += answer.usage_chunk(cached_tokens=generation.reused_tokens)
            chunk += openai_answers.DONE
        await response.write(chunk)
    await response.write_eof()
    return response


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _refuse(error: ApiError) -> web.Response:
    return _json(openai_answers.error_body(error), status=error.status)


def _logger() -> logging.Logger:
    """Return a logger that drops errors about invalid HTTP: these are the client's fault and are answered with 400."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
