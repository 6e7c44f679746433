"""A scripted picker that replaces the router: ext_proc, EDS, health and access log on one port.

Tests of Envoy's configuration use this picker. The picker sends each mode's messages with the test's pick, and records
Envoy's messages. The picker does not use the router's stream state machine, so that tests compare two independent
implementations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import any_pb2, json_format, struct_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_extproc import names
from dualmap_extproc.wire import access_log_pb2, base_pb2, discovery_pb2, ext_proc_pb2
from harness.waiting import until
from ports import reserved_port

MESSAGE_BYTES_MAX = 64 << 20
CHUNK_BYTES = 62_000
BODY_BYTES_MAX = 16 << 20
SILENCE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One pick: the destination list, the pool's cluster, and the request ID."""

    destination: str
    cluster: str
    id: str = "request-1"


@dataclass(slots=True, kw_only=True)
class Seen:
    """The messages of one ext_proc stream that the picker received."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    kinds: list[str] = field(default_factory=list)
    served: str | None = None
    cancelled: bool = False


Choose = Callable[[Seen], Awaitable[Pick | int]]


def always(destination: str, cluster: str) -> Choose:
    """Return a function that returns the same pick for every request."""

    async def choose(seen: Seen) -> Pick | int:
        return Pick(destination=destination, cluster=cluster)

    return choose


@dataclass(slots=True, kw_only=True)
class Picker:
    """The scripted picker. The function ``choose`` returns a Pick, or an HTTP status for an immediate response."""

    choose: Choose
    port: int = 0
    streams: list[Seen] = field(default_factory=list)
    entries: list[access_log_pb2.HTTPAccessLogEntry] = field(default_factory=list)
    clusters: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    eds_requests: list[discovery_pb2.DiscoveryRequest] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen on ``port``, or on a reserved port for 0; do nothing if the picker already listens."""
        if self._server is not None:
            return
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)]
        )
        server.add_generic_rpc_handlers((
            _service(names.EXT_PROC_SERVICE, names.EXT_PROC_METHOD, grpc.stream_stream_rpc_method_handler(
                self._process, ext_proc_pb2.ProcessingRequest.FromString, _serialize)),
            _service(names.EDS_SERVICE, names.EDS_METHOD, grpc.stream_stream_rpc_method_handler(
                self._endpoints, discovery_pb2.DiscoveryRequest.FromString, _serialize)),
            _service(names.ACCESS_LOG_SERVICE, names.ACCESS_LOG_METHOD, grpc.stream_unary_rpc_method_handler(
                self._logs, access_log_pb2.StreamAccessLogsMessage.FromString, _serialize)),
        ))  # fmt: skip
        health = health_aio.HealthServicer()
        await health.set("", HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        self.port = self.port or reserved_port()
        server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Abort every stream and close the port, like a killed router."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def publish(self, cluster: str, hosts: list[tuple[str, int, str]]) -> None:
        """Publish the cluster's hosts by EDS: address, port, health (HEALTHY, DRAINING...)."""
        self.clusters[cluster] = hosts
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_entries(self, count: int) -> None:
        """Wait until the access log has reported this number of finished requests."""

        async def arrived() -> bool:
            return len(self.entries) >= count

        await until(arrived, f"{count} access log entries")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _process(self, messages: AsyncIterator[ext_proc_pb2.ProcessingRequest], context: Any) -> None:
        seen = Seen()
        self.streams.append(seen)
        try:
            await _Conversation(seen, self.choose, _one_at_a_time(context.write)).run(messages)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise

    async def _endpoints(self, messages: AsyncIterator[discovery_pb2.DiscoveryRequest], context: Any) -> None:
        first = await anext(messages)
        self.eds_requests.append(first)
        reader = asyncio.create_task(_drain(messages, self.eds_requests))
        version = 0
        try:
            while True:
                changed = self._changed
                version += 1
                resources = [_packed(_assignment(name, self.clusters.get(name, []))) for name in first.resource_names]
                await context.write(
                    discovery_pb2.DiscoveryResponse(
                        version_info=str(version), nonce=str(version), type_url=first.type_url, resources=resources
                    )
                )
                await changed.wait()
        finally:
            reader.cancel()

    async def _logs(
        self, messages: AsyncIterator[access_log_pb2.StreamAccessLogsMessage], context: Any
    ) -> access_log_pb2.StreamAccessLogsResponse:
        async for message in messages:
            self.entries.extend(message.http_logs.log_entry)
        return access_log_pb2.StreamAccessLogsResponse()


@dataclass(slots=True)
class _Conversation:
    """Answers the messages of one request as the message mode requires."""

    seen: Seen
    choose: Choose
    send: Callable[[ext_proc_pb2.ProcessingResponse], Awaitable[None]]
    chunks: int = 0
    duplex: bool = False
    no_wait: bool = False
    decided: bool = False
    silence: asyncio.Task[None] | None = None

    async def run(self, messages: AsyncIterator[ext_proc_pb2.ProcessingRequest]) -> None:
        try:
            await self._answer_all(messages)
        finally:
            self._end_silence()

    async def _answer_all(self, messages: AsyncIterator[ext_proc_pb2.ProcessingRequest]) -> None:
        async for message in messages:
            self._end_silence()
            kind = message.WhichOneof("request")
            assert kind is not None
            self.seen.kinds.append(kind)
            if message.HasField("protocol_config"):
                self.duplex = message.protocol_config.request_body_mode == ext_proc_pb2.FULL_DUPLEX_STREAMED
                self.no_wait = message.protocol_config.send_body_without_waiting_for_header_response
            if not await getattr(self, f"_{kind}")(message):
                return

    async def _request_headers(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        for header in message.request_headers.headers.headers:
            self.seen.headers[header.key] = header.raw_value.decode() or header.value
        if message.request_headers.end_of_stream:
            return await self._decide()
        if not self.duplex and not self.no_wait:
            await self.send(ext_proc_pb2.ProcessingResponse(request_headers=ext_proc_pb2.HeadersResponse()))
        return True

    async def _request_body(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        self.seen.body += message.request_body.body
        self.chunks += 1
        if len(self.seen.body) > BODY_BYTES_MAX:
            await self._refuse(413)
            return False
        if self.decided:
            await self.send(ext_proc_pb2.ProcessingResponse(request_body=ext_proc_pb2.BodyResponse()))
            return True
        whole = not self.duplex and not self.no_wait
        if whole or message.request_body.end_of_stream:
            return await self._decide()
        if self.no_wait and len(self.seen.body) == int(self.seen.headers.get("content-length", -1)):
            self.silence = asyncio.create_task(self._decide_after_silence())
        return True

    async def _decide_after_silence(self) -> None:
        """Send the pick for a complete body without an end of stream, because the request has trailers."""
        await asyncio.sleep(SILENCE_S)
        await self._decide(trailers=True)

    def _end_silence(self) -> None:
        if self.silence is not None and not self.decided:
            self.silence.cancel()

    async def _request_trailers(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        going_on = self.decided or await self._decide(trailers=True)
        if going_on:
            await self.send(ext_proc_pb2.ProcessingResponse(request_trailers=ext_proc_pb2.TrailersResponse()))
        return going_on

    async def _decide(self, *, trailers: bool = False) -> bool:
        self.decided = True
        pick = await self.choose(self.seen)
        if isinstance(pick, int):
            await self._refuse(pick)
            return False
        answer = ext_proc_pb2.ProcessingResponse(dynamic_metadata=_metadata(pick))
        whole = self.chunks and not self.duplex and not self.no_wait
        (answer.request_body if whole else answer.request_headers).response.CopyFrom(_common(pick, trailers=trailers))
        await self.send(answer)
        if self.duplex:
            await self._send_body_back(trailers=trailers)
        elif self.no_wait:
            for _ in range(self.chunks):
                await self.send(ext_proc_pb2.ProcessingResponse(request_body=ext_proc_pb2.BodyResponse()))
        return True

    async def _send_body_back(self, *, trailers: bool) -> None:
        if not self.chunks:
            return
        body = bytes(self.seen.body)
        for start in range(0, max(len(body), 1), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(body) and not trailers
            answer = ext_proc_pb2.ProcessingResponse()
            streamed = answer.request_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = body[start : start + CHUNK_BYTES], last
            await self.send(answer)

    async def _refuse(self, status: int) -> None:
        answer = ext_proc_pb2.ProcessingResponse()
        answer.immediate_response.status.code = status
        answer.immediate_response.body = b'{"error": {"message": "refused by the picker"}}'
        await self.send(answer)

    async def _response_headers(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        metadata = message.metadata_context.filter_metadata
        if names.LB_NAMESPACE in metadata:
            self.seen.served = json_format.MessageToDict(metadata[names.LB_NAMESPACE]).get(names.SERVED_KEY)
        await self.send(ext_proc_pb2.ProcessingResponse(response_headers=ext_proc_pb2.HeadersResponse()))
        return True

    async def _response_body(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        answer = ext_proc_pb2.ProcessingResponse(response_body=ext_proc_pb2.BodyResponse())
        if self.duplex:
            streamed = answer.response_body.response.body_mutation.streamed_response
            streamed.body = message.response_body.body
            streamed.end_of_stream = message.response_body.end_of_stream
        await self.send(answer)
        return self.duplex

    async def _response_trailers(self, message: ext_proc_pb2.ProcessingRequest) -> bool:
        await self.send(ext_proc_pb2.ProcessingResponse(response_trailers=ext_proc_pb2.TrailersResponse()))
        return True


def _one_at_a_time(write: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """Serialise writes, because gRPC rejects concurrent writes."""
    lock = asyncio.Lock()

    async def send(message: Any) -> None:
        async with lock:
            await write(message)

    return send


def _common(pick: Pick, *, trailers: bool) -> ext_proc_pb2.CommonResponse:
    common = ext_proc_pb2.CommonResponse(clear_route_cache=True)
    headers = {names.DESTINATION_HEADER: pick.destination, names.CLUSTER_HEADER: pick.cluster}
    if trailers:
        headers[names.NO_RETRY_HEADER] = "1"
    for key, value in headers.items():
        common.header_mutation.set_headers.add(
            header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
            append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    return common


def _metadata(pick: Pick) -> struct_pb2.Struct:
    return json_format.ParseDict(
        {
            names.LB_NAMESPACE: {names.DESTINATION_KEY: pick.destination},
            names.DUALMAP_NAMESPACE: {names.REQUEST_ID_KEY: pick.id},
        },
        struct_pb2.Struct(),
    )


def _assignment(name: str, hosts: list[tuple[str, int, str]]) -> discovery_pb2.ClusterLoadAssignment:
    assignment = discovery_pb2.ClusterLoadAssignment(cluster_name=name)
    locality = assignment.endpoints.add()
    for address, port, health in hosts:
        host = locality.lb_endpoints.add(health_status=base_pb2.HealthStatus.Value(health))
        host.endpoint.address.socket_address.address = address
        host.endpoint.address.socket_address.port_value = port
    return assignment


def _packed(assignment: discovery_pb2.ClusterLoadAssignment) -> any_pb2.Any:
    return any_pb2.Any(type_url=names.CLUSTER_LOAD_ASSIGNMENT_TYPE, value=assignment.SerializeToString())


async def _drain(messages: AsyncIterator[Any], into: list[Any]) -> None:
    async for message in messages:
        into.append(message)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _service(service: str, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.GenericRpcHandler[Any, Any]:
    return grpc.method_handlers_generic_handler(service, {method: handler})
