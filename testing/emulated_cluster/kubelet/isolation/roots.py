"""Containers with their own root file systems, without a container engine: namespaces, an overlay, chroot.

``runtimes.py`` describes each process; ``launch.py`` starts the process.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from emulated_cluster.kubelet.isolation.processes import Process
from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError
from emulated_cluster.kubelet.pod_spec.identity import Identity

_LAUNCH: Final = str(Path(__file__).with_name("launch.py"))
# The number of user IDs that images and pods need. A user namespace with a single mapped user has too few.
_USERS: Final = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A folder with a read-only root file system, and the image's configuration.

    ``entrypoint`` runs with the container's args if the container has no command. The container's variables override
    ``environment``. ``user`` is ``uid[:gid]`` or a name in the image's /etc/passwd.
    """

    root: Path
    entrypoint: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = "0"
    directory: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A file or folder of this machine, mounted in a container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program in a container: the main program, or the command of a probe or hook."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    who: Identity
    no_new_privileges: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """The environment of a main process.

    ``network`` is the file descriptor of a network namespace, ``scratch`` an empty folder.
    """

    network: int
    root: Path
    scratch: Path
    hostname: str
    mounts: Sequence[Mount]
    read_only: bool


def why_not() -> str | None:
    """Return the reason why this machine cannot run containers with their own root file systems, or None."""
    if os.geteuid() != 0:
        return "containers with their own root file systems need root, or netns.sh's user namespace"
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if sum(int(line[2]) for line in lines) < _USERS:
        return "this user namespace has too few users to run containers as other users: run as root"
    command = ["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        return f"containers need their own namespaces: {tried.stderr.strip()}"
    if Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() != "1":
        return "pods cannot reach each other: net.ipv4.ip_forward is 0 and netns.sh may not change it"
    return None


async def start(command: Command, surface: Surface, *, log: Path) -> Process:
    """Start a container's main process; raises ContainerConfigError with the reason if the process cannot run."""
    plan = {
        **_told(command),
        "join": None,
        "network": surface.network,
        "root": str(surface.root),
        "scratch": str(surface.scratch),
        "hostname": surface.hostname,
        # Mount a folder before the mounts inside it.
        "mounts": [asdict(each) for each in sorted(surface.mounts, key=lambda each: each.target)],
        "read_only": surface.read_only,
    }
    return await _launch(plan, log=log, descriptors=(surface.network,))


async def run(command: Command, container: Process, *, log: Path) -> int:
    """Run another program in a running container to its end; return its exit status."""
    try:
        process = await _launch({**_told(command), "join": container.pid}, log=log)
    except ContainerConfigError as error:
        with log.open("a") as output:
            output.write(f"{error}\n")
        return 126
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise


async def _launch(plan: Mapping[str, object], *, log: Path, descriptors: Sequence[int] = ()) -> Process:
    plan_fd = os.memfd_create("plan")
    os.write(plan_fd, json.dumps(plan).encode())
    os.lseek(plan_fd, 0, os.SEEK_SET)
    told, report = os.pipe()
    try:
        process = await Process.start(
            [sys.executable, "-I", "-S", _LAUNCH, str(plan_fd), str(report)],
            environment={},
            log=log,
            descriptors=(plan_fd, report, *descriptors),
        )
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(plan_fd)
        os.close(report)
    try:
        trouble = await _read(told)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if trouble:
        await process.wait()
        raise ContainerConfigError(trouble)
    return process


async def _read(descriptor: int) -> str:
    """Read until the writer closes the pipe."""
    reader = asyncio.StreamReader()
    with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)) as pipe:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            return (await reader.read()).decode(errors="replace")
        finally:
            transport.close()


def _told(command: Command) -> dict[str, object]:
    return {
        "argv": list(command.argv),
        "environment": dict(command.environment),
        "directory": command.directory,
        "uid": command.who.uid,
        "gid": command.who.gid,
        "groups": command.who.groups,
        "no_new_privileges": command.no_new_privileges,
    }
