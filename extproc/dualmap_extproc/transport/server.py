"""The gRPC side of the router: ports, the ext_proc service, health, deadlines, and the drain.

Together with the access log's and EDS's own servicers the only place that knows grpc.aio, and the only one that reads
the event loop's clock. It feeds each stream's state machine (``stream``) and writes what that returns, at once or when
a held request is released.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_edge.logs import get_logger
from dualmap_edge.ports import AddressError, address
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.request.observations import Decided, Report
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire

_Context: TypeAlias = "grpc.aio.ServicerContext[wire.ProcessingRequest, wire.ProcessingResponse]"
Handler: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"
Credentials: TypeAlias = Callable[[], grpc.ServerCredentials]

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs has only its type

LIVENESS_SERVICE = "liveness"
# The empty name is what Envoy and Kubernetes ask for by default: the server as a whole.
READINESS_SERVICES = ("", "readiness", EXT_PROC_SERVICE)

# Health must be seen to turn before the port closes: Envoy and Kubernetes poll it.
NOTICE_S = 0.5
_DEADLINE_POLL_S = 1.0
# While requests are held deadlines come and go with every event; looking at all members' may take 0.1 ms.
_HELD_POLL_S = 0.02
# Streams' deadlines are 0.1 s and more, and only for requests that are not as they should be.
_SILENCE_POLL_S = 0.02
# Deadlines closer together than this are kept in one go.
_DEADLINE_PAUSE_S = 0.005
_NO_END_S = 1e6
# A handler that has returned has not yet sent its call's end; one that is cut before breaks the response in Envoy.
_FLUSH_S = 0.25
# As many as a pool may hold (docs/pool.md); above what Envoy's circuit breakers let through.
_STREAMS_PENDING_MAX = 100_000
_log = get_logger(__name__)


class ExternalProcessor:
    """The ext_proc service: one state machine per stream, driven by the loop's clock."""

    def __init__(self, picker: Picker, report: Report, limits: Limits) -> None:
        self._picker = picker
        self._report = report
        self._limits = limits
        self._silences = _Silences()
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> Handler:
        """Return the service as grpc.aio registers it."""
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=wire.ProcessingRequest.FromString,
            response_serializer=wire.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {EXT_PROC_METHOD: method})

    @property
    def open_requests(self) -> int:
        """How many streams are open: requests of which Envoy may still ask something."""
        return self._streams

    async def idle(self) -> None:
        """Return when no stream is open."""
        await self._idle.wait()

    def hold_no_more(self) -> None:
        """Have what is held sent on, and nothing held any longer."""
        self._picker.hold_no_more(asyncio.get_running_loop().time())

    async def _process(self, _: object, context: _Context) -> None:
        """Serve one stream. However it ends, its books are closed."""
        clock = asyncio.get_running_loop().time
        voice = _Voice(context)
        stream = Stream(self._picker, self._limits, voice.say)
        cancelled = True
        self._streams += 1
        self._idle.clear()
        try:
            while not stream.ended:
                message = await context.read()
                if voice.speaking is not None:
                    await voice.speaking
                if message is _EOF:
                    break
                now = clock()
                undecided = not stream.decided
                answers = stream.receive(now, message)
                if undecided and stream.decided:
                    done_s = clock()
                    self._report(Decided(now=done_s, seconds=done_s - now))
                for answer in answers:
                    await context.write(answer)
                self._silences.watch(stream, voice)
            cancelled = False
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._silences.forget(stream)
            stream.close(clock(), cancelled=cancelled)
            voice.cancel()
            self._streams -= 1
            if not self._streams:
                self._idle.set()


class _Voice:
    """Writes what a stream has to say while its next message is awaited: after silence, or on being released.

    What it says then is no answer to a message that has just come, so no handler stands ready to write it. gRPC takes
    one write at a time: ``speaking`` are the answers being written, to be awaited before anything else is.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.speaking: asyncio.Task[None] | None = None

    def say(self, answers: Sequence[wire.ProcessingResponse]) -> None:
        """Write answers, after those that are being written."""
        self.speaking = asyncio.create_task(self._write(answers, after=self.speaking))
        # A call that ends meanwhile fails the write; its handler knows by itself.
        self.speaking.add_done_callback(lambda task: task.cancelled() or task.exception())

    def cancel(self) -> None:
        """Say no more; the stream is over."""
        if self.speaking is not None:
            self.speaking.cancel()

    async def _write(self, answers: Sequence[wire.ProcessingResponse], after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await after
        for answer in answers:
            await self._context.write(answer)


class _Silences:
    """Has streams go on whose deadlines pass while their next messages are awaited.

    All are looked at 50 times a second while there are any: nearly every request sets a deadline and nearly none
    meets it, and timers of its own would cost each 6 us. Should the answer end its stream (a refusal), Envoy closes
    it; nothing is left to read.
    """

    def __init__(self) -> None:
        self._watched: dict[Stream, _Voice] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Stream, voice: _Voice) -> None:
        """See to it that the stream's present deadline is met; ``voice`` says what comes of it."""
        if stream.deadline_s is not None:
            self._watched[stream] = voice
            if self._timer is None:
                self._set_timer()

    def forget(self, stream: Stream) -> None:
        """Watch a stream no longer; it is over."""
        self._watched.pop(stream, None)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for stream, voice in tuple(self._watched.items()):
            if stream.deadline_s is None:
                self.forget(stream)
            elif stream.deadline_s <= now:
                answers = stream.on_deadline(now)
                if answers:
                    voice.say(answers)
        self._timer = None
        if self._watched:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SILENCE_POLL_S, self._look)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports that were bound."""

    grpc: int
    health: int
    als: int


class GrpcServers:
    """The router's three gRPC ports: everything for Envoy, health in plain text, and the access log.

    ``services`` go on the gRPC port beside ext_proc and health, ``access_log`` on its own port and on the gRPC port.
    """

    def __init__(
        self,
        processor: ExternalProcessor,
        *,
        services: Sequence[Handler],
        access_log: Sequence[Handler],
        limits: Limits,
    ) -> None:
        self._processor = processor
        self._health = health_aio.HealthServicer()
        # Above the body limit, so that a body that is too large is refused by us with a 413 and not by gRPC.
        receive_bytes = 4 * limits.body_bytes
        options = [
            ("grpc.max_receive_message_length", receive_bytes),
            ("grpc.max_send_message_length", -1),
            # A port in use is an error, not a port shared with whoever has it.
            ("grpc.so_reuseport", 0),
            # Held requests are open streams. Of more than 1000 that come at once gRPC refuses some by itself, without a
            # word to us, and Envoy sends those on unrouted.
            ("grpc.server.max_pending_requests", _STREAMS_PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _STREAMS_PENDING_MAX),
            # Envoy's keepalive pings are welcome at any pace.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        self._main, self._plain_health, self._als = (grpc.aio.server(options=options) for _ in range(3))
        self._main.add_generic_rpc_handlers((processor.handler(), *services, *access_log))
        self._als.add_generic_rpc_handlers(tuple(access_log))
        for server in (self._main, self._plain_health):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(
        self,
        host: str,
        *,
        grpc_port: int,
        health_port: int,
        als_port: int,
        credentials: Credentials | None,
    ) -> Ports:
        """Bind and serve, not ready yet; ``credentials`` makes those of one port. Raises AddressError."""
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS_SERVICE, HealthCheckResponse.SERVING)
        ports = Ports(
            grpc=_bind(self._main, host, grpc_port, "--grpc-port", credentials),
            health=_bind(self._plain_health, host, health_port, "--health-port", None),
            als=_bind(self._als, host, als_port, "--als-port", credentials),
        )
        for server in (self._plain_health, self._als, self._main):
            await server.start()
        return ports

    async def ready(self) -> None:
        """Say to whoever asks for health that requests may come."""
        await self._set_ready(HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float) -> None:
        """Stop within ``timeout_s``: readiness goes first, then no new streams, and open ones are served to their end.

        Only ext_proc streams are waited for: discovery, access log and health watches last as long as their clients.
        Held requests are sent on when the notice is over: what instances have to do may take longer than is left.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        _log.info("draining", open_requests=self._processor.open_requests, at_most_s=timeout_s)
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(min(NOTICE_S, timeout_s))
        self._processor.hold_no_more()
        # The grace never runs out: in grpc.aio 1.85 a `stop` whose grace does while another `stop` ends crashes.
        stopping = asyncio.create_task(self._main.stop(_NO_END_S))
        idle = asyncio.create_task(self._processor.idle())
        left_s = max(0.0, deadline_s - loop.time())
        await asyncio.wait((stopping, idle), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        cut = self._processor.open_requests
        if not cut:
            await asyncio.wait((stopping,), timeout=_FLUSH_S)
        await self.close()
        await stopping
        _log.info("stopped", cut_requests=cut)

    async def close(self) -> None:
        """Stop at once, cutting what is open."""
        await asyncio.gather(*(server.stop(None) for server in (self._main, self._als, self._plain_health)))

    async def _set_ready(self, status: "HealthCheckResponse.ServingStatus") -> None:
        for service in READINESS_SERVICES:
            await self._health.set(service, status)


async def keep_deadlines(picker: Picker) -> None:
    """Let the picker do what is due when it is, until cancelled.

    It sleeps until the next deadline, but looks again every second, and more often while requests are held.
    """
    clock = asyncio.get_running_loop().time
    first_held = asyncio.Event()
    picker.on_first_held(first_held.set)
    while True:
        deadline_s = picker.next_deadline()
        if deadline_s is not None and deadline_s <= clock():
            picker.on_deadline(clock())
            deadline_s = picker.next_deadline()
        first_held.clear()
        sleep_s = _HELD_POLL_S if picker.holding else _DEADLINE_POLL_S
        if deadline_s is not None:
            # Never no time at all: a deadline that does not go away must not keep the loop from everything else.
            sleep_s = min(max(deadline_s - clock(), _DEADLINE_PAUSE_S), sleep_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sleep_s):
                await first_held.wait()


def _bind(server: grpc.aio.Server, host: str, port: int, option: str, credentials: Credentials | None) -> int:
    where = address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, credentials())
    except RuntimeError as error:
        raise AddressError(host, port, option, error) from None
