"""A router's peers as a process of its own, for tests: ``python peer_process.py NAME [PORT...]``.

The process prints its port, connects to the ports, and answers each Declined message with the same one. It ends when
its standard input ends.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from dualmap.ownership.messages import Message
from dualmap_extproc.peers.dialer import Address
from extproc.peer_routers import Heard, Router


class Echo(Heard):
    """Answers each message with the same one."""

    router: Router

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        self.router.peers.send(pool, peer, message)


async def serve(name: str, ports: list[int]) -> None:
    echo = Echo()
    router = echo.router = Router(name, heard=echo)
    await router.listen()
    router.start(*(Address("127.0.0.1", port) for port in ports))
    print(router.address.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await router.stop()


@asynccontextmanager
async def peer_process(name: str, *ports: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run the process; yield it with its port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, name, *map(str, ports)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], [int(port) for port in sys.argv[2:]]))
