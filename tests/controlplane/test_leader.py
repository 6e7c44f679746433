"""Tests of leader election with a Lease: one leader at a time, release at a stop, and loss without a renewal."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.fake_kube import Clock, Counts, FakeKube, Request, until
from dualmap_edge.kube.client import KubeError
from dualmap_operator.api import Api
from dualmap_operator.run.leader import Leadership, LeadershipLostError
from dualmap_operator.settings import LeaseSettings

COLLECTION = "/apis/coordination.k8s.io/v1/namespaces/dualmap-system/leases"
LEASE = f"{COLLECTION}/dualmap-operator"
# The retry pause is short, because the tests' clock determines all other times.
SETTINGS = LeaseSettings(retry_s=0.001)
NOON = datetime(2026, 7, 1, 12, 0, 0, 250_000, tzinfo=UTC)


class LeaseServer:
    """An API server with one Lease and optimistic locking."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.lease: dict[str, Any] | None = None
        self.away = False
        self.lose_answers = False
        self.kube.answer("GET", LEASE, self._get)
        self.kube.answer("POST", COLLECTION, self._post)
        self.kube.answer("PUT", LEASE, self._put)
        self.clock = Clock()
        self.api = Api(self.kube, Counts(), lambda: True)  # type: ignore[arg-type]  # stands for it

    def candidate(self, identity: str, **zone: Any) -> Leadership:
        return Leadership(
            self.api,
            SETTINGS,
            namespace="dualmap-system",
            identity=identity,
            clock=self.clock,
            now=lambda: NOON.astimezone(**zone),
        )

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    @property
    def writes(self) -> int:
        return sum(request.method != "GET" for request in self.kube.requests)

    def _get(self, _request: Request) -> dict[str, Any]:
        self._check()
        if self.lease is None:
            raise KubeError(404, "not found")
        return self.lease

    def _post(self, request: Request) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise KubeError(409, "exists")
        return self._store(request, 1)

    def _put(self, request: Request) -> dict[str, Any]:
        self._check()
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if request.body["metadata"]["resourceVersion"] != version:
            raise KubeError(409, "changed")
        stored = self._store(request, int(version) + 1)
        if self.lose_answers:
            self.lose_answers = False
            raise KubeError(0, "the answer was lost")
        return stored

    def _store(self, request: Request, version: int) -> dict[str, Any]:
        metadata = {**request.body["metadata"], "resourceVersion": str(version)}
        self.lease = {**request.body, "metadata": metadata}
        return self.lease

    def _check(self) -> None:
        if self.away:
            raise KubeError(0, "away")


@pytest.fixture
async def server() -> AsyncIterator[LeaseServer]:
    yield LeaseServer()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_first_leader_candidate_creates_lease_with_utc_times(server: LeaseServer) -> None:
    first = server.candidate("first")
    await first.acquire()

    assert first.leading
    assert server.spec == {
        "holderIdentity": "first",
        "leaseDurationSeconds": 12,
        "acquireTime": "2026-07-01T12:00:00.250000Z",
        "renewTime": "2026-07-01T12:00:00.250000Z",
        "leaseTransitions": 0,
    }


async def test_second_leader_candidate_waits_without_writing(server: LeaseServer) -> None:
    await server.candidate("first").acquire()
    second = server.candidate("second")
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: len(server.kube.requests) > 10)

    assert not waiting.done()
    assert not second.leading
    assert server.writes == 1


async def test_expired_lease_is_acquired_by_the_next_candidate(server: LeaseServer) -> None:
    first = server.candidate("first")
    await first.acquire()
    second = server.candidate("second")
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: len(server.kube.requests) > 3)

    server.clock.now_s += 7.9
    assert first.leading
    server.clock.now_s += 0.1
    assert not first.leading, "it stops before anybody may take the lease"
    server.clock.now_s += 3.9
    await until(lambda: len(server.kube.requests) > 6)
    assert not waiting.done()

    server.clock.now_s += 0.2
    await waiting
    assert second.leading
    assert server.spec["holderIdentity"] == "second"
    assert server.spec["leaseTransitions"] == 1


async def test_renewed_lease_is_not_acquired_by_another_candidate(server: LeaseServer) -> None:
    first, second = server.candidate("first"), server.candidate("second")
    await first.acquire()
    renewing = asyncio.create_task(first.renew())
    waiting = asyncio.create_task(second.acquire())
    for _ in range(20):
        seen, asked = server.writes, len(server.kube.requests)
        server.clock.now_s += 3
        await until(lambda seen=seen, asked=asked: server.writes > seen and len(server.kube.requests) > asked + 3)

    assert first.leading
    assert not waiting.done()
    assert not renewing.done()


async def test_clock_difference_does_not_expire_the_leader_lease(server: LeaseServer) -> None:
    from datetime import timezone

    await server.candidate("first", tz=timezone(timedelta(hours=9))).acquire()
    second = server.candidate("second", tz=timezone(timedelta(hours=-7)))
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: len(server.kube.requests) > 10)

    assert not waiting.done()
    assert server.spec["renewTime"] == "2026-07-01T12:00:00.250000Z"


async def test_released_lease_is_acquired_at_once(server: LeaseServer) -> None:
    first, second = server.candidate("first"), server.candidate("second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: len(server.kube.requests) > 3)

    await first.release()
    await waiting

    assert not first.leading
    assert second.leading


async def test_leader_without_renewal_by_the_deadline_loses_lease(server: LeaseServer) -> None:
    first = server.candidate("first")
    await first.acquire()
    server.away = True
    renewing = asyncio.create_task(first.renew())
    await until(lambda: len(server.kube.requests) > 5)
    assert not renewing.done(), "there is time to try again"

    server.clock.now_s += 8
    with pytest.raises(LeadershipLostError, match="not renewed within 8 s"):
        await renewing
    assert not first.leading


async def test_leader_loses_lease_at_once_if_another_holder_appears(server: LeaseServer) -> None:
    first = server.candidate("first")
    await first.acquire()
    assert server.lease is not None
    server.lease = {
        "metadata": {**server.lease["metadata"], "resourceVersion": "99"},
        "spec": {**server.spec, "holderIdentity": "second"},
    }

    with pytest.raises(LeadershipLostError, match="another operator holds"):
        await first.renew()
    assert server.spec["holderIdentity"] == "second"


async def test_leader_keeps_lease_if_renewal_response_is_lost(server: LeaseServer) -> None:
    first = server.candidate("first")
    await first.acquire()
    server.lose_answers = True
    renewing = asyncio.create_task(first.renew())
    server.clock.now_s += 5
    await until(lambda: server.writes > 3)
    server.clock.now_s += 5

    assert first.leading
    assert not renewing.done()


async def test_leader_retries_an_unreachable_api_server(server: LeaseServer) -> None:
    server.away = True
    first = server.candidate("first")
    waiting = asyncio.create_task(first.acquire())
    await until(lambda: len(server.kube.requests) > 3)
    server.away = False

    await waiting
    assert first.leading


async def test_simultaneous_candidates_elect_exactly_one_leader(server: LeaseServer) -> None:
    candidates = [server.candidate(f"candidate-{number}") for number in range(5)]
    waiting = [asyncio.create_task(each.acquire()) for each in candidates]
    await until(lambda: len(server.kube.requests) > 30)

    assert sum(each.leading for each in candidates) == 1
    assert sum(each.done() for each in waiting) == 1


@pytest.mark.parametrize("hangs", [False, True])
async def test_leader_detects_lost_lease_at_the_deadline(server: LeaseServer, hangs: bool) -> None:
    loop = asyncio.get_running_loop()
    api = HangingApi(server.api) if hangs else server.api
    first = Leadership(
        api,  # type: ignore[arg-type]  # stands for it
        LeaseSettings(renew_within_s=0.05, retry_s=0.001 if hangs else 1000.0),
        namespace="dualmap-system",
        identity="first",
        clock=loop.time,
    )
    await first.acquire()

    with pytest.raises(LeadershipLostError, match="not renewed within"):
        await asyncio.wait_for(first.renew(), timeout=10.0)
    assert not first.leading


class HangingApi:
    """An API server that answers every request except renewals."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if method == "PUT":
            await asyncio.Event().wait()
        return await self._api.request(method, path, **options)


@pytest.mark.parametrize("there", [False, True])
async def test_lease_acquired_during_stop_is_released(server: LeaseServer, there: bool) -> None:
    if there:
        before = server.candidate("before")
        await before.acquire()
        await before.release()
    first = Leadership(
        SlowApi(server.api),  # type: ignore[arg-type]  # stands for it
        SETTINGS,
        namespace="dualmap-system",
        identity="first",
        clock=server.clock,
    )
    taking = asyncio.create_task(first.acquire())
    await until(lambda: server.lease is not None and server.spec["holderIdentity"] == "first")
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await first.release()

    assert server.spec["holderIdentity"] == ""


class SlowApi:
    """An API server that executes the first write immediately and never responds."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._wrote = False

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = await self._api.request(method, path, **options)
        if method != "GET" and not self._wrote:
            self._wrote = True
            await asyncio.Event().wait()
        return answer


async def test_standby_candidate_releases_no_lease(server: LeaseServer) -> None:
    await server.candidate("first").acquire()
    second = server.candidate("second")
    await asyncio.gather(asyncio.wait_for(second.acquire(), 0.05), return_exceptions=True)
    await second.release()

    assert server.spec["holderIdentity"] == "first"
