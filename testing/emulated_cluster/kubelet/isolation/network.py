"""A pod's own network namespace, so that several pods can bind the same port.

``home.py`` creates a network namespace for each pod that runs from images. A pair of virtual interfaces connects the
pod's namespace to the tests' namespace (``netns.sh``), which forwards packets. Pods can reach the DNS and API servers
in the tests' namespace.
"""

import asyncio
import contextlib
import ipaddress
import os
from typing import Final, Self

# The gateway of all pods. The control plane uses other addresses of this block, such as `ADVERTISED`.
GATEWAY: Final = "10.244.255.254"
# Commands in the pod's namespace: $1 is the pod's address, $2 the gateway. `echo` reports that the namespace exists;
# `read` waits for the interface. As in container runtimes, every user may bind ports below 1024, if /proc/sys is
# writable.
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
# Commands in the tests' namespace: $1 is the pod's address, $2 the gateway, $3 the outer interface's name, and $4 a
# process in the pod's namespace. netns.sh adds the pods' network to the routing table `local`, so the route to each pod
# must be in the same table.
_OUTSIDE: Final = """
set -e
ip link add "$3" type veth peer name eth0 netns "$4"
ip address add "$2/32" dev "$3"
ip link set "$3" up
ip route replace "$1/32" dev "$3" table local
"""


class NetworkError(Exception):
    """The creation of a pod's network failed. The message has the output of the commands."""


class PodNetwork:
    """One pod's network namespace, which exists until ``close`` and the end of its processes."""

    def __init__(self, namespace: int, interface: str) -> None:
        self.namespace = namespace
        self._interface = interface

    @classmethod
    async def make(cls, address: str) -> Self:
        """Create a network namespace with ``address``, reachable from the tests' namespace; raises NetworkError."""
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
