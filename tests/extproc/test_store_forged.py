"""Entries that no router wrote, in a real Redis: a router reads them and still serves its pool."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

import builders
from dualmap.pools.pool import Queue, Routing, Slo
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.scaling.reports import ROUTERS_MAX, Report, Share
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.store.codec import encode_report, encode_update
from dualmap_extproc.store.peers import PEERS_MAX, KnownPeers
from dualmap_extproc.store.redis import loads_key, reports_key, updates_key
from dualmap_extproc.transport.deadlines import keep_deadlines
from extproc.test_store_replicas import Router, routers
from redis_server import RedisServer, redis_server
from waiting import until

# The default dispatch window queues requests; the longest wait is short, so that the test is.
QUEUEING = replace(builders.pool(3, routing=Routing(queue=Queue(max_wait_s=4.0))), slo=Slo(ttft_s=1.0))
ABSURD = SharedLoad(
    pending_prefill_tokens=2**62, backlog_s=1e9, held_s=1e9, in_flight=2**32 - 1, active_kv_tokens=2**62
)
NOTHING = HotnessCounts(requests=0, nodes={})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    with server.admin as admin:
        admin.flushall()
        yield admin


def forge_loads(admin: redis.Redis, peer: str, load: SharedLoad) -> None:
    loads = {member.id: load for member in QUEUEING.members}
    entry = encode_update(ReplicaUpdate(hotness=NOTHING, loads=loads))
    admin.xadd(loads_key(QUEUEING.id), {"p": peer, "n": entry})


async def ask(router: Router, text: str) -> Picked | Refused:
    """Send a request; return its answer after any time in the queue."""
    answered: asyncio.Future[Picked | Refused] = asyncio.get_running_loop().create_future()
    body = json.dumps({"model": builders.MODEL, "prompt": text}).encode()
    now = router.clock()
    answer = router.picker.pick(now, body, None, now, headers={}, resume=answered.set_result)
    return await answered if isinstance(answer, AnswerLater) else answer


async def test_forged_loads_reject_no_request(server: RedisServer, admin: redis.Redis) -> None:
    async with routers(server, "one", pool=QUEUEING) as (one,):

        async def forge() -> None:
            while True:
                forge_loads(admin, "forged", ABSURD)
                await asyncio.sleep(0.5)

        tasks = [asyncio.create_task(forge()), asyncio.create_task(keep_deadlines(one.picker))]
        await until(lambda: one.picker.statuses()[0].peers == 1)
        answers = []
        for number in range(3):
            answers.append(await ask(one, f"prompt {number}"))
            if isinstance(answers[-1], Picked):
                one.picker.finished(one.clock(), answers[-1].request_id, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, Picked) for answer in answers), answers


async def test_forged_peers_are_bounded_and_replace_no_known_peer(server: RedisServer, admin: redis.Redis) -> None:
    async with routers(server, "one", "other", pool=QUEUEING) as (one, other):
        await until(lambda: one.picker.statuses()[0].peers == 1 and other.picker.statuses()[0].peers == 1)
        report = encode_report(Report(own=Share(desired_replicas=1e6), pool=Share(desired_replicas=1e6)))
        counted = encode_update(ReplicaUpdate(hotness=HotnessCounts(requests=1, nodes={1: 1})))
        for number in range(300):
            forge_loads(admin, f"forged {number}", SharedLoad(in_flight=1))
            admin.xadd(reports_key(QUEUEING.id), {"p": f"forged {number}", "n": report})
            admin.xadd(updates_key(QUEUEING.id), {"p": f"forged {number}", "n": counted})
        await until(lambda: one.picker.statuses()[0].peers >= PEERS_MAX)
        assert one.picker.statuses()[0].peers <= PEERS_MAX
        assert "other" in peers_of(one)
        assert one.pool_demand.total(QUEUEING.id).desired_replicas <= ROUTERS_MAX * 10_000


def peers_of(router: Router) -> set[str]:
    """The other routers with loads that a router counts."""
    pool = router.picker._served.router(QUEUEING.id)
    assert pool is not None
    return set(pool._fleet._others._peers._loads)


class TestKnownPeers:
    def test_known_peers_stay_and_others_are_refused(self) -> None:
        known = KnownPeers()
        real = [f"real {n}" for n in range(PEERS_MAX - 1)]
        assert known.refused(0.0, real) == set()
        assert known.refused(1.0, ["late", "later", "real 0"]) == {"later"}
        assert known.refused(2.0, [f"forged {n}" for n in range(3000)]) == {f"forged {n}" for n in range(3000)}
        assert known.refused(3.0, [*real, "late"]) == set()

    def test_known_peers_silent_for_a_minute_make_room(self) -> None:
        known = KnownPeers()
        known.refused(0.0, [f"ended {n}" for n in range(PEERS_MAX)])
        assert known.refused(59.0, ["new"]) == {"new"}
        assert known.refused(60.0, ["new", *(f"newer {n}" for n in range(PEERS_MAX))]) == {f"newer {PEERS_MAX - 1}"}
