"""Tests of the chart's recordings: a volume for two routers that restart, and what their merged recordings contain."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.site import Site, request_id
from dualmap.recordings.values import Header, RecordedRequest
from dualmap_extproc.recording.hashing import KeyedHashes, Purpose
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import persistent_volume
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from harness.processes import dualmap_argv
from harness.traffic import Exchange, Outcome, Traffic, tally
from harness.waiting import until
from recorded_folder import lines_of, requests_of

CLAIM = "recordings"
KEY_SECRET = "recordings-key"
VALUES = {
    "router": {
        "record": {
            "enabled": True,
            "volume": {"persistentVolumeClaim": {"claimName": CLAIM}},
            "keySecretName": KEY_SECRET,
        }
    }
}
# Requests that each router must have recorded before the next step.
_EACH = 5
_SOON_S = 60.0


class Recordings:
    """The volume with the recordings of all routers, one folder for each pod that ever was."""

    def __init__(self, volume: Path, secret: bytes) -> None:
        self.volume = volume
        self.secret = secret

    def folders(self) -> dict[str, Path]:
        """Return the folders by the names of their pods."""
        return {each.name: each for each in self.volume.iterdir()}

    def counts(self) -> Counter[str]:
        """Return the number of recorded requests of each pod."""
        return Counter({name: len(requests_of(folder)) for name, folder in self.folders().items()})

    def requests(self) -> list[RecordedRequest]:
        """Return the recorded requests of all pods."""
        return [request for folder in self.folders().values() for request in requests_of(folder)]

    def times(self, exchanges: list[Exchange]) -> dict[int, int]:
        """Return how often each exchange is recorded, by its number."""
        hashes = KeyedHashes(self.secret)
        recorded = Counter(request.request for request in self.requests())
        return {each.number: recorded[hashes.text(request_id(each.number), Purpose.REQUEST)] for each in exchanges}

    async def until_more(self, than: Counter[str], pods: set[str]) -> None:
        """Wait until the recordings of these pods have a few requests more than before."""

        async def there() -> bool:
            now = self.counts()
            return all(now[pod] >= than[pod] + _EACH for pod in pods)

        await until(there, f"{pods} record more than {dict(than)}", timeout_s=_SOON_S)

    async def until_complete(self, exchanges: list[Exchange]) -> None:
        """Wait until each routed request with a whole answer is recorded."""
        missing: list[int] = []

        async def there() -> bool:
            times = self.times(exchanges)
            missing[:] = [each.number for each in exchanges if _must_be_recorded(each) and not times[each.number]]
            return not missing

        try:
            await until(there, "all requests are recorded", timeout_s=_SOON_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; missing {missing} of {dict(self.counts())}") from error


def _must_be_recorded(exchange: Exchange) -> bool:
    """Whether a request was answered by a router's decision. Without a router, Envoy answers without one."""
    return exchange.outcome is Outcome.OK and exchange.routed


@pytest.fixture(name="recordings")
def _recordings(cluster: Cluster, site: Site, tmp_path: Path) -> Iterator[Recordings]:
    """A volume and a key for the recordings of the site's routers."""
    volume, secret = tmp_path / CLAIM, secrets.token_bytes(32)
    volume.mkdir()
    made = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY_SECRET},
        "stringData": {"key": secret.hex()},
    }
    cluster.kubectl("apply", "-n", site.namespace, "-f", "-", input=json.dumps(made))
    with persistent_volume(cluster, site.namespace, CLAIM, volume):
        yield Recordings(volume, secret)


@pytest.mark.timeout(600, func_only=True)
async def test_merged_recordings_have_each_request_once_but_those_of_a_killed_router(
    site: Site, recordings: Recordings, kubelet: ProcessKubelet, tmp_path: Path
) -> None:
    await site.install(VALUES)
    await site.make_pool(2)
    await site.until_answered()
    killed, deleted = await routers(site)
    assert set(recordings.folders()) == {killed, deleted}
    traffic = await site.traffic(streams=3, plain=1, tokens=20, prompt=prompt_of)

    async with traffic.running():
        await recordings.until_more(Counter(), {killed, deleted})
    await recordings.until_complete(traffic.exchanges)

    at_risk = await kill(site, kubelet, killed, traffic, recordings)
    kept = [each for each in traffic.exchanges if each not in at_risk]
    await recordings.until_complete(kept)

    async with traffic.running():
        await traffic.flowing(10)
        await site.kubectl("delete", f"pod/{deleted}", "--timeout=120s")
        await site.until_deployed("router", 2)
        (new,) = set(await routers(site)) - {killed}
        await recordings.until_more(recordings.counts(), {killed, new})
    kept = [each for each in traffic.exchanges if each not in at_risk]
    await recordings.until_complete(kept)

    times = recordings.times(traffic.exchanges)
    lost = [each for each in at_risk if _must_be_recorded(each) and not times[each.number]]
    print(f"two routers, one killed, one deleted: {dict(tally(traffic.exchanges))}; lost {len(lost)} of {len(at_risk)}")
    assert set(times.values()) <= {0, 1}
    assert recordings.folders().keys() == {killed, deleted, new}
    shown = await merged(recordings, tmp_path / "merged.jsonl.gz")
    assert shown["requests"] == sum(recordings.counts().values())
    assert shown["requests"] >= sum(map(_must_be_recorded, kept))
    assert set(shown["routers"]) == {killed, deleted, new}
    assert shown["dropped"] == 0
    # The routers have the same hashes, so the merged recording shows what the prompts share.
    assert len({requests_of(folder)[-1].blocks[0] for folder in recordings.folders().values()}) == 1
    assert shown["reuse_at_best"] > 0.5


async def kill(
    site: Site, kubelet: ProcessKubelet, name: str, traffic: Traffic, recordings: Recordings
) -> list[Exchange]:
    """Kill a router under load, and wait until it records again in its folder.

    Return the requests that began since the last complete recording and before the router was gone. Only they may be
    lost.
    """
    before = len(traffic.exchanges)
    view = kubelet.pod(site.namespace, name)

    async def gone() -> bool:
        processes = (await asyncio.to_thread(kubelet.pod, site.namespace, name)).processes
        return processes.get("router") != view.processes["router"]

    async with traffic.running():
        await traffic.flowing(10)
        await asyncio.to_thread(kubelet.kill, view)
        await until(gone, f"{name} is killed", timeout_s=_SOON_S)
        at_risk = traffic.exchanges[before:]
        await recordings.until_more(recordings.counts(), set(await routers(site)))
        await site.until_deployed("router", 2)
    starts = [line for line in lines_of(recordings.folders()[name]) if isinstance(line, Header)]
    assert len(starts) >= 2
    return at_risk


async def routers(site: Site) -> list[str]:
    """Return the names of the routers' pods that are not terminating."""
    pods = await site.get("pods", "-l", "app.kubernetes.io/component=router")
    return [pod["metadata"]["name"] for pod in pods["items"] if "deletionTimestamp" not in pod["metadata"]]


def prompt_of(number: int) -> str:
    """Return a prompt whose beginning all requests share."""
    return f"{'You are a helpful assistant. ' * 40} Question {number}."


async def merged(recordings: Recordings, output: Path) -> dict[str, Any]:
    """Merge the recordings and return what ``dualmap trace show`` says about them."""
    await run("trace", "merge", *recordings.folders().values(), "-o", output)
    shown: dict[str, Any] = json.loads(await run("trace", "show", output, "--json"))
    return shown


async def run(*arguments: str | Path) -> str:
    """Run a dualmap command and return its output."""
    process = await asyncio.create_subprocess_exec(
        *dualmap_argv(*arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return said.decode()
