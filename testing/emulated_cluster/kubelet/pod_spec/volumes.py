"""A pod's volumes: folders of this machine that its containers mount.

The files of a volume from objects change with the objects.

``home.py`` holds the volumes of a pod; ``payloads.py`` computes the files of a volume from objects. As with a real
kubelet, all files of such a volume change at once. The files are in a separate folder, the target of the link
``..data``. A rename of a new link to ``..data`` replaces all files. A file watcher sees this rename as a move.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.follow import Mirror, follow
from emulated_cluster.api.retries import NOT_FOUND, RETRY_S, is_temporary
from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError, Field
from emulated_cluster.kubelet.pod_spec.identity import Owner
from emulated_cluster.kubelet.pod_spec.payloads import (
    COLLECTIONS,
    File,
    Object,
    Payload,
    Reference,
    contents,
    read_payload,
)

# Renew a token when a fifth of its lifetime is left, like a real kubelet.
_RENEWED_AT: Final = 0.8
_TOKEN_LIFETIME_S: Final = 3600


class Volumes:
    """All volumes of one pod; belongs to one event loop.

    ``close`` ends the watches of the volumes' objects.
    """

    def __init__(self, fields: Field, client: ApiClient, owner: Owner, *, folder: Path, memory: Path) -> None:
        """Create volumes in ``folder``, and volumes with the medium Memory in ``memory``, a folder of a tmpfs."""
        self._source = _Objects(fields.pod["metadata"]["namespace"], client)
        self._fields = fields
        self._client = client
        self._owner = owner
        self._folder = folder
        self._memory = memory
        self._paths: dict[str, Path] = {}
        self._read_only: set[str] = set()
        self._payloads: dict[str, _PayloadVolume] = {}
        self._keeping: list[asyncio.Task[None]] = []

    async def prepare(self) -> None:
        """Create every volume; a caller may repeat the call after a failure. Raises ContainerConfigError."""
        for volume in self._fields.pod["spec"].get("volumes") or ():
            if volume["name"] not in self._paths:
                await self._make(volume)

    def path(self, name: str) -> Path:
        """Return a volume's folder; raises ContainerConfigError for a volume that the pod does not have."""
        if name not in self._paths:
            raise ContainerConfigError(f"volumeMounts: the pod has no volume {name}")
        return self._paths[name]

    def read_only(self, name: str) -> bool:
        """Whether the volume is always read-only, whatever its mount specifies."""
        return name in self._read_only

    def observe(self, pod: Object) -> None:
        """Use a new version of the pod, because files may contain its labels and annotations."""
        self._fields = replace(self._fields, pod=pod)
        for volume in self._payloads.values():
            volume.changed.set()

    async def close(self) -> None:
        """Stop the watches and remove the folders in memory; the caller removes the other folders."""
        self._source.close()
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, *self._source.tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._memory, ignore_errors=True)

    async def _make(self, volume: Object) -> None:
        name = volume["name"]
        if "emptyDir" in volume:
            home = self._memory if volume["emptyDir"].get("medium") == "Memory" else self._folder
            path = home / name
            path.mkdir(parents=True, exist_ok=True)
            self._owner.own_writable_folder(path)
            self._paths[name] = path
            return
        if "persistentVolumeClaim" in volume:
            await self._claim(name, volume["persistentVolumeClaim"])
            return
        payload = read_payload(volume)
        if payload is None:
            kind = next((key for key in volume if key != "name"), "nothing")
            raise ContainerConfigError(f"volume {name}: {kind} is not supported")
        path = self._folder / name
        path.mkdir(parents=True, exist_ok=True)
        made = _PayloadVolume(payload, path, self._owner)
        self._source.add_listener(made)
        token = _Token(payload.token, self._fields.pod, self._client)
        made.write(payload.files(await self._source.get(payload.references), self._fields, await token.get()))
        self._paths[name] = path
        self._read_only.add(name)
        self._payloads[name] = made
        self._keeping.append(asyncio.create_task(self._keep(made, token)))

    async def _claim(self, name: str, source: Object) -> None:
        """Use the folder of a persistent volume, which stays when the pod ends."""
        namespace = self._fields.pod["metadata"]["namespace"]
        path = await _folder_of_claim(self._client, namespace, source["claimName"])
        if source.get("readOnly", False):
            self._read_only.add(name)
        else:
            await asyncio.to_thread(self._owner.own_tree, path)
        self._paths[name] = path

    async def _keep(self, volume: "_PayloadVolume", token: "_Token") -> None:
        """Write the volume's files again after each change of its objects, and renew its token."""
        while True:
            # Not asyncio.wait_for: in Python 3.11, wait_for loses a cancellation at the moment of the change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(token.good_for_s):
                    await volume.changed.wait()
            volume.changed.clear()
            objects = await self._source.get(volume.payload.references)
            try:
                volume.write(volume.payload.files(objects, self._fields, await token.get()))
            except ContainerConfigError:
                # Like a real kubelet, keep the files of a deleted object, and retry a rejected token request.
                await asyncio.sleep(RETRY_S)


class _PayloadVolume:
    """The folder of a volume from objects; a possible change of an object sets ``changed``."""

    def __init__(self, payload: Payload, folder: Path, owner: Owner) -> None:
        self.payload = payload
        self.changed = asyncio.Event()
        self._folder = folder
        self._owner = owner
        self._written: Mapping[str, File] | None = None

    def write(self, files: Mapping[str, File]) -> None:
        """Replace all files of the folder at once."""
        if files == self._written:
            return
        version = Path(tempfile.mkdtemp(prefix=f"..{datetime.now(UTC):%Y_%m_%d_%H_%M_%S}.", dir=self._folder))
        version.chmod(0o755)
        for path, file in files.items():
            target = version / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
            self._owner.own_file(target, file)
        data = self._folder / "..data"
        before = data.resolve() if data.is_symlink() else None
        new = self._folder / "..data_tmp"
        new.symlink_to(version.name)
        new.replace(data)
        shown = {Path(path).parts[0] for path in files}
        for name in shown:
            link = self._folder / name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / name)
        for entry in self._folder.iterdir():
            if not entry.name.startswith("..") and entry.name not in shown:
                entry.unlink()
        if before is not None:
            shutil.rmtree(before)
        self._written = files


class _Objects:
    """The ConfigMaps and Secrets of one namespace that a pod's volumes use, with a watch of each object."""

    def __init__(self, namespace: str, client: ApiClient) -> None:
        self._namespace = namespace
        self._client = client
        self._found: dict[Reference, Mapping[str, Object]] = {}
        self._known: dict[Reference, asyncio.Event] = {}
        self._listeners: list[_PayloadVolume] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add_listener(self, volume: _PayloadVolume) -> None:
        """Notify this volume of changes."""
        self._listeners.append(volume)

    async def get(self, references: frozenset[Reference]) -> dict[Reference, Object | None]:
        """Return the current objects, with None for a missing object, and start their watches."""
        for reference in references:
            if reference not in self._known:
                self._known[reference] = asyncio.Event()
                self.tasks.append(asyncio.create_task(self._follow(reference)))
            await self._known[reference].wait()
        return {each: next(iter(self._found[each].values()), None) for each in references}

    def close(self) -> None:
        """Stop the watches by cancelling ``tasks``."""
        for task in self.tasks:
            task.cancel()

    async def _follow(self, reference: Reference) -> None:
        kind, name = reference
        path = f"/api/v1/namespaces/{self._namespace}/{COLLECTIONS[kind]}"
        only = (("fieldSelector", f"metadata.name={name}"),)

        def changed(objects: Mapping[str, Object]) -> None:
            self._found[reference] = objects
            self._known[reference].set()
            for volume in self._listeners:
                if reference in volume.payload.references:
                    volume.changed.set()

        await follow(self._client, path, Mirror(changed), query=only)


class _Token:
    """A token of the pod's service account from the TokenRequest API, bound to the pod and renewed before it
    expires."""

    def __init__(self, source: Object | None, pod: Object, client: ApiClient) -> None:
        self._source = source
        self._pod = pod
        self._client = client
        self._token = ""
        self._renew_at_s = 0.0

    @property
    def good_for_s(self) -> float | None:
        """Seconds until the renewal of the token, or None without a token."""
        return None if self._source is None else max(0.0, self._renew_at_s - asyncio.get_running_loop().time())

    async def get(self) -> str:
        """Return a valid token from the API server, or "" if the volume has no token."""
        if self._source is None or self.good_for_s:
            return self._token
        lifetime_s = self._source.get("expirationSeconds", _TOKEN_LIFETIME_S)
        metadata = self._pod["metadata"]
        pod = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        audience = self._source.get("audience")
        spec = {
            "audiences": [audience] if audience else [],
            "expirationSeconds": lifetime_s,
            "boundObjectRef": pod,
        }
        account = self._pod["spec"].get("serviceAccountName") or "default"
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await persistently(self._client, "POST", path, body=request)
        if answer is None:
            raise ContainerConfigError(f"service account {account} of {metadata['namespace']} not found")
        self._token = answer["status"]["token"]
        self._renew_at_s = asyncio.get_running_loop().time() + _RENEWED_AT * lifetime_s
        return self._token


async def _folder_of_claim(client: ApiClient, namespace: str, claim: str) -> Path:
    """Return the folder of the persistent volume that the cluster has bound to a claim.

    Raises ContainerConfigError for a claim that is missing or not bound, and for a volume that is not of the type
    ``local`` or has no folder.
    """
    named = f'persistentvolumeclaim "{claim}"'
    found = await persistently(client, "GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
    if found is None or found.get("status", {}).get("phase") != "Bound":
        raise ContainerConfigError(f"{named} {'not found' if found is None else 'is not bound'}")
    volume = await persistently(client, "GET", f"/api/v1/persistentvolumes/{found['spec']['volumeName']}")
    local = None if volume is None else volume["spec"].get("local")
    if local is None:
        raise ContainerConfigError(f"{named}: only volumes of the type local are supported")
    path = Path(local["path"])
    if not await asyncio.to_thread(path.is_dir):
        raise ContainerConfigError(f"{named}: path {path} does not exist")
    return path


async def values_of(client: ApiClient, namespace: str, reference: Reference) -> Mapping[str, bytes] | None:
    """Return the current values of a ConfigMap or Secret by key, or None for a missing object."""
    kind, name = reference
    path = f"/api/v1/namespaces/{namespace}/{COLLECTIONS[kind]}/{name}"
    found = await persistently(client, "GET", path)
    return None if found is None else contents(kind, found)


async def persistently(client: ApiClient, method: str, path: str, *, body: object = None) -> Mapping[str, Any] | None:
    """Repeat a request until the API server answers; return None if the object does not exist.

    Raises ContainerConfigError if the server rejects the request.

    The server rejects requests in a terminating namespace, but the namespace's pods may still run.
    """
    while True:
        try:
            return await client.request(method, path, body=body)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            if not is_temporary(error):
                raise ContainerConfigError(f"{method} {path}: {error}") from error
        await asyncio.sleep(RETRY_S)
