"""A pod's own network namespace. Two pods may listen on the same port of all addresses.

``home.py`` creates one for each pod that runs from images. A pair of virtual interfaces connects it to the namespace of
the tests (``netns.sh``), which forwards packets. Servers in that namespace (DNS, API server) are reachable for pods at
every address that is local there.
"""

import asyncio
import contextlib
import ipaddress
import os
from typing import Final, Self

# The gateway of all pods. The control plane uses other addresses of this block, such as `ADVERTISED`.
GATEWAY: Final = "10.244.255.254"
# In the pod: $1 is its address, $2 the gateway. `echo` reports that the namespace exists; `read` waits for the
# interface. As with container runtimes, every user may listen on ports below 1024, if /proc/sys is writable.
_INSIDE: Final = """
echo; read -r _
set -e
ip link set lo up
ip address add "$1/32" dev eth0
ip link set eth0 up
ip route add "$2" dev eth0
ip route add default via "$2"
echo 0 2>/dev/null >/proc/sys/net/ipv4/ip_unprivileged_port_start || :
"""
# Outside: $1 and $2 as above, $3 the interface's name here, $4 a process in the pod's namespace. The pods' whole
# network is local here (netns.sh), so the route to each pod must be in the same table.
_OUTSIDE: Final = """
set -e
ip link add "$3" type veth peer name eth0 netns "$4"
ip address add "$2/32" dev "$3"
ip link set "$3" up
ip route replace "$1/32" dev "$3" table local
"""


class NetworkError(Exception):
    """A pod's network could not be created. The message has the tools' output."""


class PodNetwork:
    """One pod's network namespace. It exists until ``close`` and the end of the processes in it."""

    def __init__(self, namespace: int, interface: str) -> None:
        self.namespace = namespace
        self._interface = interface

    @classmethod
    async def make(cls, address: str) -> Self:
        """Create a namespace with ``address``, reachable from here; raises NetworkError."""
        interface = interface_of(address)
        inside = await asyncio.create_subprocess_exec(
            "unshare", "--net", "sh", "-c", _INSIDE, "sh", address, GATEWAY,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert inside.stdin is not None
        assert inside.stdout is not None
        try:
            said = await inside.stdout.readline()
            if said != b"\n":
                raise NetworkError(f"unshare --net: {said.decode().strip()}")
            namespace = os.open(f"/proc/{inside.pid}/ns/net", os.O_RDONLY)
            made = cls(namespace, interface)
            try:
                await _run("sh", "-c", _OUTSIDE, "sh", address, GATEWAY, interface, str(inside.pid))
                told, _ = await inside.communicate(b"\n")
                if inside.returncode:
                    raise NetworkError(f"network namespace of {address}: set-up failed: {told.decode().strip()}")
            except BaseException:
                await made.close()
                raise
        finally:
            if inside.returncode is None:
                inside.kill()
                await inside.wait()
        return made

    async def close(self) -> None:
        """Delete the interface and release the namespace."""
        with contextlib.suppress(NetworkError):
            await _run("ip", "link", "delete", self._interface)
        os.close(self.namespace)


def interface_of(address: str) -> str:
    """Return the name of the outer interface for the pod with this address."""
    return f"pod{int(ipaddress.IPv4Address(address)):08x}"


async def _run(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise NetworkError(f"{argv[0]}: {said.decode().strip()}")
