"""Runs a container's commands: as processes of this machine, or in the root file system of their image.

``pods.py`` chooses the runtime of a container; ``process_containers.py`` starts the container with this runtime.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from emulated_cluster.kubelet.containers.containers import Object, PodLocation
from emulated_cluster.kubelet.containers.home import PodHome
from emulated_cluster.kubelet.isolation import roots
from emulated_cluster.kubelet.isolation.processes import Process, run
from emulated_cluster.kubelet.isolation.roots import Command, Image, Surface
from emulated_cluster.kubelet.pod_spec.environment import (
    ContainerConfigError,
    Field,
    Values,
    command_line,
    environment,
    references,
    service_links,
)
from emulated_cluster.kubelet.pod_spec.identity import identity

# The API server's admission adds a mount of the service account's token at this path. Processes of this machine do not
# get the token.
_TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Returns the values of a ConfigMap or Secret of the pod's namespace, by kind and name.
Lookup = Callable[[str, str], Awaitable[Values]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A main process, and a function that runs another command in the same container and returns the exit status."""

    process: Process
    execute: Callable[[Sequence[str], Path], Awaitable[int]]


class Runtime(Protocol):
    """Starts the main process of one container."""

    async def start(self, log: Path) -> Started:
        """Start the main process, which appends its output to ``log``; raises ContainerConfigError."""


class HostRuntime:
    """Runs a container's command as a process of this machine, without volumes."""

    def __init__(self, pod: Object, spec: Object, location: PodLocation, lookup: Lookup) -> None:
        self._pod = pod
        self._spec = spec
        self._location = location
        self._lookup = lookup

    async def start(self, log: Path) -> Started:
        """Start the main process, which appends its output to ``log``; raises ContainerConfigError."""
        for mount in self._spec.get("volumeMounts") or ():
            if mount["mountPath"] != _TOKEN:
                raise ContainerConfigError(
                    f"container {self._spec['name']}: {mount['mountPath']} cannot be mounted, because the "
                    f"emulated kubelet has no root file system for the image {self._spec.get('image', '')} "
                    f"and runs the container as a process of this machine, without volumes"
                )
        variables = environment(
            self._spec,
            _fields(self._pod, self._location),
            base=self._location.node.environment,
            objects=await _looked_up(self._spec, self._lookup),
        )
        argv = command_line(self._spec, variables)
        process = await Process.start(argv, environment=variables, log=log)

        async def execute(command: Sequence[str], log: Path) -> int:
            return await run(command, environment=variables, log=log)

        return Started(process=process, execute=execute)


class RootedRuntime:
    """Runs a container in the root file system of its image, with the volumes and the network of its pod."""

    def __init__(
        self, pod: Object, spec: Object, location: PodLocation, lookup: Lookup, *, image: Image, home: PodHome
    ) -> None:
        self._pod = pod
        self._spec = spec
        self._location = location
        self._lookup = lookup
        self._image = image
        self._home = home

    async def start(self, log: Path) -> Started:
        """Start the main process, which appends its output to ``log``; raises ContainerConfigError."""
        await self._home.prepare()
        who = identity(self._pod, self._spec, root=self._image.root, image_user=self._image.user)
        host, port = self._location.node.api_server
        base = {
            **(service_links(await self._home.services()) if self._pod["spec"].get("enableServiceLinks", True) else {}),
            "PATH": _PATH,
            "HOSTNAME": self._home.hostname,
            "HOME": who.home,
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(port),
            **self._image.environment,
        }
        variables = environment(
            self._spec,
            _fields(self._pod, self._location),
            base=base,
            objects=await _looked_up(self._spec, self._lookup),
        )
        context = self._spec.get("securityContext") or {}

        def command(argv: Sequence[str]) -> Command:
            return Command(
                argv=argv,
                environment=variables,
                directory=self._spec.get("workingDir") or self._image.directory,
                who=who,
                no_new_privileges=not context.get("allowPrivilegeEscalation", True),
            )

        argv = command_line(self._spec, variables, entrypoint=self._image.entrypoint)
        surface = Surface(
            network=self._home.network,
            root=self._image.root,
            scratch=self._home.scratch(self._spec["name"]),
            hostname=self._home.hostname,
            mounts=self._home.mounts(self._spec, variables),
            read_only=context.get("readOnlyRootFilesystem", False),
        )
        process = await roots.start(command(argv), surface, log=log)

        async def execute(argv: Sequence[str], log: Path) -> int:
            return await roots.run(command(argv), process, log=log)

        return Started(process=process, execute=execute)


def _fields(pod: Object, location: PodLocation) -> Field:
    return Field(pod=pod, address=location.address, host_address=location.host_address)


async def _looked_up(container: Object, lookup: Lookup) -> Callable[[str, str], Values]:
    """Read all objects that the container's variables refer to; return a lookup for their values."""
    found: Mapping[tuple[str, str], Values] = {
        (kind, name): await lookup(kind, name) for kind, name in references(container)
    }
    return lambda kind, name: found[kind, name]
