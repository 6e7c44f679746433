"""Runs one pod on the node: runs its containers, publishes its status, and deletes the pod's object at the end.

``agent.py`` starts one worker per pod and passes the watch's events to the worker. ``status.py`` computes the status.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.retries import NOT_FOUND, RETRY_S, STRATEGIC_MERGE, Retries
from emulated_cluster.kubelet.containers.containers import Container, FakeContainer, Object, PodLocation
from emulated_cluster.kubelet.containers.home import PodHome
from emulated_cluster.kubelet.containers.process_containers import ProcessContainer
from emulated_cluster.kubelet.containers.runtimes import HostRuntime, RootedRuntime, Runtime, Started
from emulated_cluster.kubelet.containers.status import Placement, Terminated, pod_status
from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError, Values
from emulated_cluster.kubelet.pod_spec.volumes import values_of

# A pod with this annotation set to "true" has a status but no processes, so a test can create a thousand such pods.
FAKE_ANNOTATION: Final = "kubelet.dualmap.dev/fake"
# The grace period of containers if the pod's object no longer exists.
_FORGOTTEN_GRACE_S: Final = 1.0
_LOG: Final = logging.getLogger(__name__)


class PodWorker:
    """Runs a pod from its scheduling to its end, also while the API server is down."""

    def __init__(self, pod: Object, location: PodLocation, client: ApiClient, turns: asyncio.Semaphore) -> None:
        """``turns`` limits the number of workers that send requests to the API server at once."""
        metadata = pod["metadata"]
        self.namespace: str = metadata["namespace"]
        self.name: str = metadata["name"]
        self.uid: str = metadata["uid"]
        self.location = location
        self._pod = pod
        self._path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self._client = client
        self._turns = turns
        self._where = Placement(address=location.address, host_address=location.host_address, start_s=time.time())
        self._changed = asyncio.Event()
        self._terminating = False
        self._gone = False
        self._home = PodHome(pod, location, client) if _has_image(pod, location) else None
        fake = (metadata.get("annotations") or {}).get(FAKE_ANNOTATION) == "true"
        make = self._fake if fake else self._container
        self.containers: Mapping[str, Container] = {each["name"]: make(each) for each in pod["spec"]["containers"]}
        # A fake pod is ready at once and runs no init containers.
        initial = () if fake else pod["spec"].get("initContainers") or ()
        policy = "Never" if pod["spec"].get("restartPolicy") == "Never" else "OnFailure"
        self.init_containers: Mapping[str, Container] = {each["name"]: make(each, policy) for each in initial}
        self._end_if_told()
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(lambda _: self._changed.set())

    @property
    def ready(self) -> bool:
        """Whether the pod's published Ready condition is True."""
        conditions = self._pod.get("status", {}).get("conditions") or ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def observe(self, pod: Object) -> None:
        """Use a version of the pod from the API server, unless the worker has a newer version."""
        if _version(pod) > _version(self._pod):
            self._pod = pod
            self._end_if_told()
            self._changed.set()
            if self._home is not None:
                self._home.observe(pod)

    def forget(self) -> None:
        """Handle the deletion of the pod's object: publish no more statuses and stop the containers."""
        self._gone = True
        self._stop(_FORGOTTEN_GRACE_S)

    async def run(self) -> None:
        """Publish every change of the status until the pod has terminated, then delete the pod's object.

        Raises the error that ended the worker.
        """
        while True:
            self._changed.clear()
            await self._publish()
            if self._life.done():
                self._life.result()
                if self._terminating:
                    break
            await self._changed.wait()
        # Publish the last container's end before the deletion of the object.
        await self._publish()
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        await self._say("DELETE", self._path, options, "application/json")

    async def abandon(self) -> None:
        """Kill the containers' processes and prevent a restart."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)

    async def _live(self) -> None:
        """Run the init containers, then the other containers; remove the pod's files and network at the end."""
        try:
            for each in self.init_containers.values():
                await each.run()
                state = each.view.state
                if not (isinstance(state, Terminated) and state.exit_code == 0):
                    return
            async with asyncio.TaskGroup() as lives:
                for each in self.containers.values():
                    lives.create_task(each.run())
        finally:
            if self._home is not None:
                await self._home.close()

    def _fake(self, spec: Object, policy: str | None = None) -> Container:
        return FakeContainer(spec, self._changed.set)

    def _container(self, spec: Object, policy: str | None = None) -> Container:
        return ProcessContainer(self._pod, spec, self.location, self._runtime(spec), self._changed.set, policy=policy)

    def _runtime(self, spec: Object) -> Runtime:
        if spec.get("restartPolicy"):
            return _NoRuntime(f"container {spec['name']}: init containers that keep running are not supported")
        if self._home is None:
            return HostRuntime(self._pod, spec, self.location, self._values)
        image = self.location.node.images.get(spec.get("image", ""))
        if image is None:
            return _NoRuntime(f"image {spec.get('image')} is not among the kubelet's, as others of the pod are")
        return RootedRuntime(self._pod, spec, self.location, self._values, image=image, home=self._home)

    async def _values(self, kind: str, name: str) -> Values:
        return await values_of(self._client, self.namespace, (kind, name))

    def _end_if_told(self) -> None:
        metadata = self._pod["metadata"]
        if "deletionTimestamp" in metadata:
            self._stop(metadata.get("deletionGracePeriodSeconds") or _FORGOTTEN_GRACE_S)

    def _stop(self, grace_s: float) -> None:
        self._terminating = True
        self._changed.set()
        for container in (*self.init_containers.values(), *self.containers.values()):
            container.stop(grace_s)

    async def _publish(self) -> None:
        views = [each.view for each in self.containers.values()]
        initial = [each.view for each in self.init_containers.values()]
        status = pod_status(self._pod, views, self._where, now_s=time.time(), init_containers=initial)
        if _says(_by_type(self._pod.get("status", {})), _by_type(status)):
            return
        body = {"metadata": {"uid": self.uid}, "status": status}
        published = await self._say("PATCH", f"{self._path}/status", body, STRATEGIC_MERGE)
        if published is not None:
            self.observe(published)

    async def _say(self, method: str, path: str, body: Object, content_type: str) -> Object | None:
        """Send a request until the API server accepts it; return None when the pod no longer exists."""
        retries = Retries()
        while not self._gone:
            try:
                async with self._turns:
                    return await self._client.request(method, path, body=body, content_type=content_type)
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return None
                if retries.should_log(error):
                    _LOG.warning("%s %s: %s", method, path, error)
                retries.check(error)
            await asyncio.sleep(RETRY_S)
        return None


class _NoRuntime:
    """A runtime that rejects a container with a fixed reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def start(self, log: Path) -> Started:
        """Raise ContainerConfigError with the reason."""
        raise ContainerConfigError(self._reason)


def _has_image(pod: Object, location: PodLocation) -> bool:
    spec = pod["spec"]
    return any(
        each.get("image") in location.node.images for each in (*(spec.get("initContainers") or ()), *spec["containers"])
    )


def _version(pod: Object) -> int:
    return int(pod["metadata"]["resourceVersion"])


def _by_type(status: Object) -> Object:
    """Return a status with its conditions by type.

    A published status also has conditions of other components.
    """
    return {**status, "conditions": {each["type"]: each for each in status.get("conditions") or ()}}


def _says(published: Any, wanted: Any) -> bool:
    """Return whether a published value contains the wanted value; an empty wanted value may be absent."""
    if not wanted:
        return not published
    if isinstance(wanted, Mapping):
        return isinstance(published, Mapping) and all(_says(published.get(key), wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(published, list) and len(published) == len(wanted) and all(map(_says, published, wanted))
    return bool(published == wanted)
