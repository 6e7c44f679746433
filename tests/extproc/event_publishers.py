"""A publisher of KV events as vLLM has it, on loopback: PUB for live messages, ROUTER for replays."""

import asyncio
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from dualmap.engines.profile import EngineProfile, EventSource
from ports import reserved_port
from waiting import WAIT_S

BLOCK = 16


def stored(first_hash: int, tokens: list[int], *, parent: int | None = None, salt: str = "") -> dict[str, object]:
    """Return the event of the stored blocks of a prompt's start, or of blocks behind a parent."""
    blocks = len(tokens) // BLOCK
    return {
        "type": "BlockStored",
        "block_hashes": [first_hash + number for number in range(blocks)],
        "parent_block_hash": parent,
        "token_ids": tokens[: blocks * BLOCK],
        "block_size": BLOCK,
        "medium": "GPU",
        "extra_keys": [[salt] if salt and not number else None for number in range(blocks)],
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """The publisher of one rank on a loopback address.

    ``lost`` are the numbers that no replay contains. If ``hangs``, replays are not answered. ``asked`` are the
    numbers from which replays were requested.
    """

    def __init__(
        self, context: zmq.asyncio.Context, host: str, *, replays: bool = True, ports: tuple[int, int] = (0, 0)
    ) -> None:
        self.host = host
        self.replays = replays
        self.lost: set[int] = set()
        self.hangs = False
        self.asked: list[int] = []
        self._context = context
        self._sent: list[bytes] = []
        self._live = context.socket(zmq.XPUB)
        self._live.set(zmq.LINGER, 0)
        self._live.set(zmq.XPUB_VERBOSE, 1)
        self.port = _bind(self._live, host, ports[0])
        self._router = context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self.replay_port = _bind(self._router, host, ports[1])
        self._task = asyncio.create_task(self._serve())

    @property
    def place(self) -> str:
        return f"port {self.port}"

    @property
    def source(self) -> EventSource:
        return EventSource(rank=0, port=self.port, replay_port=self.replay_port if self.replays else None, topic="")

    def profile(self, *, started_s: float = 1000.0, **facts) -> EngineProfile:
        return EngineProfile(engine="vLLM", started_s=started_s, event_sources=(self.source,), **facts)

    async def subscribed(self) -> None:
        """Wait for a subscription."""
        async with asyncio.timeout(WAIT_S):
            while not (await self._live.recv()).startswith(b"\x01"):
                pass

    async def publish(self, *events: object, told: bool = True, as_map: bool = False) -> None:
        """Publish a batch; without ``told``, no subscriber receives it."""
        batch: object = {"ts": 1.5, "events": list(events)} if as_map else [1.5, list(events), 0]
        await self.send(msgspec.msgpack.encode(batch), told=told)

    async def send(self, payload: bytes, *, told: bool = True) -> None:
        """Publish a message with the next number."""
        self._sent.append(payload)
        if told:
            await self._live.send_multipart([b"", _number(len(self._sent) - 1), payload])

    async def send_frames(self, *frames: bytes) -> None:
        await self._live.send_multipart(list(frames))

    def history(self, *batches: list[object]) -> None:
        """Replace the messages that were published, without sending any."""
        self._sent = [msgspec.msgpack.encode([1.5, events, 0]) for events in batches]

    def restart(self) -> None:
        """Begin another life: numbers begin at 0."""
        self._sent.clear()

    async def replaced(self) -> "Publisher":
        """Close this publisher; return another one at the same address and ports."""
        await self.close()
        async with asyncio.timeout(WAIT_S):
            while True:
                # ZeroMQ frees the ports some time after a socket is closed.
                await asyncio.sleep(0.05)
                with suppress(zmq.ZMQError):
                    return Publisher(self._context, self.host, ports=(self.port, self.replay_port))

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._live.close()
        self._router.close()

    async def _serve(self) -> None:
        while True:
            identity, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.hangs:
                continue
            for number in range(self.asked[-1], len(self._sent)):
                if number not in self.lost:
                    await self._router.send_multipart([identity, b"", b"", _number(number), self._sent[number]])
            await self._router.send_multipart([identity, b"", b"", b"\xff" * 8, b""])


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    port = port or reserved_port(host)
    socket.bind(f"tcp://{host}:{port}")
    return port


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")
