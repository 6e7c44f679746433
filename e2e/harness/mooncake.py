"""A real Mooncake store: the master from PyPI, and a client of it that holds keys in its memory."""

import ctypes.util
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.processes import Child
from harness.waiting import until
from ports import reserved_port

MASTER = Path(sys.executable).with_name("mooncake_master")
# A segment of memory for the keys, and a buffer, in bytes.
_SEGMENT = 64 * 2**20
_BUFFER = 16 * 2**20
_HOLDER = f"""
import sys, threading
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
address, master, *keys = sys.argv[1:]
assert store.setup(address, "P2PHANDSHAKE", {_SEGMENT}, {_BUFFER}, "tcp", "", master) == 0
assert not any(store.put(key, b"kv") for key in keys)
print("holds", len(keys), flush=True)
threading.Event().wait()
"""


def missing() -> str:
    """Return what this machine lacks for a Mooncake store; empty if nothing."""
    if shutil.which(MASTER) is None:
        return "mooncake_master, which pip installs on Linux"
    return "" if ctypes.util.find_library("ibverbs") else "libibverbs.so.1 (e2e/debian.sh)"


class Mooncake:
    """A master on free ports of 127.0.0.1; ``url`` is its HTTP server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rpc, self._http, self._holder_port = (reserved_port() for _ in range(3))
        self.url = f"http://127.0.0.1:{self._http}"
        arguments = [f"-rpc_port={self._rpc}", f"-metrics_port={self._http}"]
        hosts = ["-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1"]
        self.master = Child("mooncake", [MASTER, *arguments, *hosts], directory=directory)
        self._holder: Child | None = None

    async def start(self) -> None:
        """Start the master; return when its HTTP server accepts connections."""
        await self.master.start()
        await until(self._accepts, "the master listens", timeout_s=60.0)

    async def hold(self, keys: Sequence[str]) -> None:
        """Put these keys with Mooncake's own client, which holds them until ``stop``."""
        argv = [sys.executable, "-c", _HOLDER, f"127.0.0.1:{self._holder_port}", f"127.0.0.1:{self._rpc}", *keys]
        self._holder = Child("mooncake-holder", argv, directory=self._directory)
        await self._holder.start()
        await self._holder.wait_for_line(r"holds \d+")

    async def stop(self) -> None:
        """Stop the master and the holder."""
        for child in (self._holder, self.master):
            if child is not None:
                await child.kill()
        self._holder = None

    async def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._http)) == 0
