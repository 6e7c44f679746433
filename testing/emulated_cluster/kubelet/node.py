"""The kubelet's node: registers it, reports it as ready, and sends heartbeats.

``agent.py`` registers the node and sends its heartbeats.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.retries import CONFLICT, MERGE, NOT_FOUND, RETRY_S, STRATEGIC_MERGE, Retries
from emulated_cluster.kubelet.containers.status import timestamp

# The heartbeat interval, far below the node-lifecycle controller's grace period, even if a test shortens this period.
HEARTBEAT_S: Final = 2.0
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_LEASE_DURATION_S: Final = 40
_CAPACITY: Final = {"cpu": "2000", "memory": "8000Gi", "ephemeral-storage": "8000Gi"}


class Node:
    """The Node object and its Lease."""

    def __init__(self, name: str, address: str, room: int, client: ApiClient) -> None:
        """``room`` is the maximum number of pods."""
        self.name = name
        self.address = address
        self._capacity = {**_CAPACITY, "pods": str(room)}
        self._path = f"/api/v1/nodes/{name}"
        self._client = client
        self._ready_since = timestamp(time.time())

    async def register(self) -> None:
        """Create a ready node without taints; retry until the API server answers."""
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}},
        }
        retries = Retries()
        while True:
            try:
                with _unless(CONFLICT):
                    await self._client.request("POST", "/api/v1/nodes", body=body)
                await self._report()
                # Admission taints every new node. Only the node-lifecycle controller removes the taint, but a test may
                # run without this controller.
                await self._client.request("PATCH", self._path, body={"spec": {"taints": None}}, content_type=MERGE)
                return
            except ApiError as error:
                retries.check(error)
            await asyncio.sleep(RETRY_S)

    async def stay_ready(self) -> None:
        """Report the status and renew the lease until cancelled, also after outages of the API server."""
        while True:
            with contextlib.suppress(ApiError):
                await self._report()
                await self._renew()
            await asyncio.sleep(HEARTBEAT_S)

    async def remove(self) -> None:
        """Delete the node. The garbage collector deletes its pods."""
        with _unless(NOT_FOUND):
            await self._client.request("DELETE", self._path)

    async def _report(self) -> None:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "the process kubelet runs",
            "lastHeartbeatTime": timestamp(time.time()),
            "lastTransitionTime": self._ready_since,
        }
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}],
            "conditions": [condition],
        }
        await self._client.request(
            "PATCH", f"{self._path}/status", body={"status": status}, content_type=STRATEGIC_MERGE
        )

    async def _renew(self) -> None:
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": _LEASE_DURATION_S,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await self._client.request("PATCH", f"{_LEASES}/{self.name}", body={"spec": spec}, content_type=MERGE)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
            await self._client.request("POST", _LEASES, body={**lease, "spec": spec})


@contextlib.contextmanager
def _unless(status: int) -> Iterator[None]:
    """Ignore a request's failure with this status, because the desired state already exists."""
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise
