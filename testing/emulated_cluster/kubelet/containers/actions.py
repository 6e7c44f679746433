"""The actions of probes and preStop hooks: HTTP request, connection, command, gRPC health check, sleep.

``probes.py`` repeats an action, ``process_containers.py`` runs one before SIGTERM.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTarget:
    """The target container of an action: address, ports, and a function that runs a command in the container."""

    address: str
    ports: Mapping[str, int]
    execute: Callable[[Sequence[str]], Awaitable[int]]

    def port(self, port: int | str) -> int:
        """Return the port with this number or name in the container; raises LookupError for an unknown name."""
        return port if isinstance(port, int) else self.ports[port]


async def perform(handler: Mapping[str, Any], target: ActionTarget, *, timeout_s: float | None) -> bool:
    """Run the action of a probe or lifecycle handler; return whether it succeeded within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in handler:
                return await target.execute(handler["exec"]["command"]) == 0
            if "httpGet" in handler:
                return await _http_get(handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _connects(handler["tcpSocket"], target)
            if "grpc" in handler:
                return await _serves(handler["grpc"], target, timeout_s=timeout_s)
            if "sleep" in handler:
                await asyncio.sleep(handler["sleep"]["seconds"])
                return True
    except (OSError, aiohttp.ClientError, TimeoutError, LookupError):
        return False
    raise ValueError(f"unknown kind of action: {dict(handler)}")


async def _http_get(action: Mapping[str, Any], target: ActionTarget) -> bool:
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or target.address
    url = f"{scheme}://{host}:{target.port(action['port'])}{action.get('path', '/')}"
    headers = {each["name"]: each["value"] for each in action.get("httpHeaders") or ()}
    # A real kubelet does not verify the server's certificate either.
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, ssl=trusting, allow_redirects=False) as answer,
    ):
        return 200 <= answer.status < 400


async def _connects(action: Mapping[str, Any], target: ActionTarget) -> bool:
    _, writer = await asyncio.open_connection(action.get("host") or target.address, target.port(action["port"]))
    writer.close()
    return True


async def _serves(action: Mapping[str, Any], target: ActionTarget, *, timeout_s: float | None) -> bool:
    """Check the gRPC health in a thread: grpc.aio supports one event loop per process, and the test already has one."""

    def check() -> bool:
        with grpc.insecure_channel(f"{target.address}:{action['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=action.get("service") or "")
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return await asyncio.to_thread(check)
