"""Publishes an engine's KV events over ZeroMQ, with vLLM's frames. Only this module uses pyzmq and msgspec here.

A PUB socket sends each message as three frames: topic, number, and msgpack. A ROUTER socket answers a number with all
kept messages from this number on, and a last message with the number -1. As in vLLM up to 0.32, the ROUTER drops
messages without notice when ``send_limit`` messages wait for a slow reader. A subscriber receives only later messages.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from dualmap_sim.block_pool import EventBatch
from dualmap_sim.errors import CannotPublish
from dualmap_sim.kv_messages import MessageLog, message_of
from dualmap_sim.server_settings import KvEventSettings

_HWM: Final = 100_000
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_TOPIC: Final = b""


class KvPublisher:
    """The publisher of one engine. Create, use and close it on one event loop."""

    def __init__(self, settings: KvEventSettings, *, host: str, adapters: tuple[str, ...] = ()) -> None:
        self._settings = settings
        self._host = f"[{host}]" if ":" in host else host
        self._adapters = adapters
        self._log = MessageLog(settings.buffer_steps)
        self._context = zmq.asyncio.Context()
        # PUB never blocks, so the event loop may call it directly.
        self._live = zmq.Socket(self._context, zmq.PUB)
        self._live.set_hwm(_HWM)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, settings.send_limit)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, ":" in host)
        self._answering: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.replay_endpoint = ""

    def start(self) -> None:
        """Listen on both ports. Raises CannotPublish."""
        self.endpoint = self._bind(self._live, self._settings.port)
        self.replay_endpoint = self._bind(self._replay, self._settings.replay_port)
        self._answering = asyncio.ensure_future(self._answer())

    @property
    def sources(self) -> dict[str, dict[str, object]]:
        """The body of ``/kv_event_sources``: the publisher's configuration by rank."""
        return {
            str(self._settings.rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": self._settings.buffer_steps,
                "hwm": _HWM,
                "max_queue_size": _HWM,
                "topic": _TOPIC.decode(),
            }
        }

    def publish(self, batch: EventBatch) -> None:
        """Send the events of one engine step."""
        settings = self._settings
        message = message_of(
            batch.events, at_s=time.time(), rank=settings.rank, as_arrays=settings.as_arrays, adapters=self._adapters
        )
        payload = msgspec.msgpack.encode(message)
        self._log.add(batch.number, payload)
        self._live.send_multipart((_TOPIC, batch.number.to_bytes(_NUMBER_BYTES, "big"), payload))

    async def close(self) -> None:
        """Close both sockets."""
        if self._answering is not None:
            self._answering.cancel()
            with suppress(asyncio.CancelledError):
                await self._answering
        self._live.close()
        self._replay.close()
        self._context.term()

    def _bind(self, socket: zmq.Socket[Any], port: int) -> str:
        endpoint = f"tcp://{self._host}:{port + self._settings.rank if port else '*'}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise CannotPublish(endpoint, str(error)) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def _answer(self) -> None:
        """Answer replay requests one after the other."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                continue
            client, _, start = frames
            # vLLM answers with the topic since it publishes partial blocks (0.26), which all use maps.
            head = (client, b"") if self._settings.as_arrays else (client, b"", _TOPIC)
            for number, payload in self._log.since(int.from_bytes(start, "big")):
                await self._replay.send_multipart((*head, number.to_bytes(_NUMBER_BYTES, "big"), payload))
            await self._replay.send_multipart((*head, _END, b""))
