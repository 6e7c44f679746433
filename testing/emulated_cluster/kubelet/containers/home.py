"""The shared resources of a pod's containers with images: network, volumes, and files such as /etc/hosts.

``pods.py`` creates a home for each pod and closes the home at the pod's end. ``runtimes.py`` starts the pod's
containers.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

from emulated_cluster.api.client import ApiClient
from emulated_cluster.kubelet.containers.containers import Object, PodLocation
from emulated_cluster.kubelet.isolation.network import PodNetwork
from emulated_cluster.kubelet.isolation.roots import Mount
from emulated_cluster.kubelet.pod_spec.environment import Field, expand
from emulated_cluster.kubelet.pod_spec.identity import Owner
from emulated_cluster.kubelet.pod_spec.volumes import Volumes, persistently

_DOMAIN: Final = "cluster.local"


class PodHome:
    """A pod's network, volumes and files, created by the first ``prepare``. Belongs to one event loop."""

    def __init__(self, pod: Object, location: PodLocation, client: ApiClient) -> None:
        metadata = pod["metadata"]
        self.hostname: str = pod["spec"].get("hostname") or metadata["name"]
        self._pod = pod
        self._location = location
        self._client = client
        self._folder = location.node.folder / metadata["uid"]
        self._volumes = Volumes(
            Field(pod=pod, address=location.address, host_address=location.host_address),
            client,
            Owner.of(pod),
            folder=self._folder / "volumes",
            memory=location.node.memory / metadata["uid"],
        )
        self._network: PodNetwork | None = None
        self._turn = asyncio.Lock()

    @property
    def network(self) -> int:
        """The file descriptor of the pod's network namespace; call ``prepare`` first."""
        assert self._network is not None, "prepare first"
        return self._network.namespace

    async def prepare(self) -> None:
        """Create all missing resources; raises ContainerConfigError if an object of a volume does not exist."""
        async with self._turn:
            if self._network is None:
                self._network = await PodNetwork.make(self._location.address)
                self._folder.mkdir(parents=True)
                self._write_files()
            await self._volumes.prepare()

    async def services(self) -> list[Object]:
        """Return the current Services of the pod's namespace."""
        namespace = self._pod["metadata"]["namespace"]
        listed = await persistently(self._client, "GET", f"/api/v1/namespaces/{namespace}/services")
        return [] if listed is None else list(listed["items"])

    def observe(self, pod: Object) -> None:
        """Use a new version of the pod's object."""
        self._volumes.observe(pod)

    def mounts(self, container: Object, variables: dict[str, str]) -> list[Mount]:
        """Return the container's mounts; raises ContainerConfigError for a volume that the pod does not have."""
        files = [
            Mount(source=str(self._folder / name), target=f"/etc/{name}", read_only=False)
            for name in ("hosts", "hostname", "resolv.conf")
        ]
        return [*files, *(self._mount(each, variables) for each in container.get("volumeMounts") or ())]

    def scratch(self, container: str) -> Path:
        """Return an empty folder for the container's root file system, which is not visible to other containers."""
        path: Path = self._folder / "roots" / container
        path.mkdir(parents=True, exist_ok=True)
        return path

    async def close(self) -> None:
        """Remove everything. The containers' processes must have ended before."""
        async with self._turn:
            await self._volumes.close()
            if self._network is not None:
                await self._network.close()
                self._network = None
                await asyncio.to_thread(shutil.rmtree, self._folder)

    def _mount(self, mount: Object, variables: dict[str, str]) -> Mount:
        name = mount["name"]
        source = self._volumes.path(name)
        within = expand(mount.get("subPathExpr", ""), variables) or mount.get("subPath", "")
        if within:
            volume, source = source, source / within
            if not source.exists():
                source.mkdir(parents=True)
                source.chmod(volume.stat().st_mode & 0o7777)
        return Mount(
            source=str(source.resolve()),
            target=mount["mountPath"],
            read_only=mount.get("readOnly", False) or self._volumes.read_only(name),
        )

    def _write_files(self) -> None:
        spec: Any = self._pod["spec"]
        namespace = self._pod["metadata"]["namespace"]
        names = self.hostname
        if spec.get("subdomain"):
            names = f"{self.hostname}.{spec['subdomain']}.{namespace}.svc.{_DOMAIN} {self.hostname}"
        aliases = [f"{each['ip']} {' '.join(each['hostnames'])}" for each in spec.get("hostAliases") or ()]
        hosts = ("127.0.0.1 localhost", "::1 localhost", f"{self._location.address} {names}", *aliases)
        (self._folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self._folder / "hostname").write_text(f"{self.hostname}\n")
        resolver = ""
        if self._location.node.nameserver is not None:
            resolver = (
                f"nameserver {self._location.node.nameserver}\n"
                f"search {namespace}.svc.{_DOMAIN} svc.{_DOMAIN} {_DOMAIN}\n"
                "options ndots:5\n"
            )
        (self._folder / "resolv.conf").write_text(resolver)
