"""A relay between a gateway and a picker that keeps the messages of every ext_proc stream, for recordings."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from certificates import Authority
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.wire import ext_proc_pb2 as wire

_BYTES_MAX = 64 << 20
_OPTIONS = (("grpc.max_receive_message_length", _BYTES_MAX), ("grpc.max_send_message_length", _BYTES_MAX))

Message = wire.ProcessingRequest | wire.ProcessingResponse


class Tap:
    """Serves ext_proc with TLS at ``host`` and passes each stream to the picker at ``picker``, without TLS.

    ``conversations`` has the messages of each stream in the order of their arrival.
    """

    def __init__(self, picker: str, *, host: str, port: int) -> None:
        self.conversations: list[list[Message]] = []
        self._channel = grpc.aio.insecure_channel(picker, options=_OPTIONS)
        self._server = grpc.aio.server(options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._pass_on,
            request_deserializer=wire.ProcessingRequest.FromString,
            response_serializer=wire.ProcessingResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {EXT_PROC_METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        credentials = grpc.ssl_server_credentials([Authority().pair()])
        self.port = self._server.add_secure_port(f"{host}:{port}", credentials)

    async def __aenter__(self) -> Self:
        for service in ("", EXT_PROC_SERVICE):
            await self._health.set(service, HealthCheckResponse.SERVING)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(grace=None)
        await self._channel.close()

    async def _pass_on(self, requests: AsyncIterator[wire.ProcessingRequest], _: Any) -> AsyncIterator[Message]:
        messages: list[Message] = []
        self.conversations.append(messages)
        call = self._channel.stream_stream(
            f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}",
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )()

        async def forward() -> None:
            async for request in requests:
                messages.append(request)
                await call.write(request)
            await call.done_writing()

        forwarding = asyncio.create_task(forward())
        try:
            async for response in call:
                messages.append(response)
                yield response
        finally:
            forwarding.cancel()
            call.cancel()
