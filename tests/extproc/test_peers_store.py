"""Tests of the store that routers without Redis keep for each other."""

import contextlib
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap_extproc.peers.codec import MESSAGE_BYTES_MAX, encode_shared
from dualmap_extproc.store.codec import LOADS_MAX, UnreadableUpdate
from dualmap_extproc.store.contract import Claim, Post, Question
from dualmap_extproc.store.exchange import Exchange
from dualmap_extproc.store.peers_store import PeersStore, Unobserved, decode_post, encode_post
from extproc.exchanges import LOADS, POOL, REPORT, Replica

UPDATE = ReplicaUpdate(
    hotness=HotnessCounts(requests=3, nodes={7: 2}, split=(7,)),
    loads={},
    placements=(Placement(endpoint="10.0.0.1:8000", hashes=(1, 2, 3)),),
)
POST = Post(pool=POOL.id, keep_s=10.0, update=UPDATE, loads=LOADS, report=REPORT)


class Routers:
    """Two connected routers: each store's payloads reach the other store."""

    def __init__(self) -> None:
        self.connected = True
        self.stores = [self._store(0), self._store(1)]
        self.replicas = [Replica(), Replica()]
        self.exchanges = [
            Exchange(
                replica,
                store,
                Unobserved(),
                reporter=replica,
                peer=f"router-{number}",
                clock=time.monotonic,
                shown="the other routers",
            )
            for number, (replica, store) in enumerate(zip(self.replicas, self.stores, strict=True))
        ]

    def _store(self, number: int) -> PeersStore:
        def share(payload: bytes) -> None:
            if self.connected:
                self.stores[1 - number].on_shared(f"router-{number}", payload)

        return PeersStore(share, lambda pool: pool == POOL.id, time.monotonic)

    async def exchange(self) -> None:
        for _ in range(2):
            for each in self.exchanges:
                assert await each.exchange()


@pytest.mark.parametrize(
    "post", [POST, replace(POST, update=None), replace(POST, loads=None, report=None), replace(POST, loads={})]
)
def test_decoded_post_equals_the_encoded_one(post: Post) -> None:
    assert decode_post(encode_post(post)) == post


@given(st.integers(0, 300))
def test_cut_or_longer_post_is_unreadable(cut: int) -> None:
    whole = encode_post(POST)
    for data in (whole[: min(cut, len(whole) - 1)], whole + b"\0", b"\2" + whole[1:]):
        with pytest.raises(UnreadableUpdate):
            decode_post(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_post_or_unreadable(junk: bytes) -> None:
    for data in (junk, encode_post(POST)[:1] + junk):
        with contextlib.suppress(UnreadableUpdate):
            assert isinstance(decode_post(data), Post)


async def test_routers_hear_of_each_other() -> None:
    routers = Routers()
    first, second = routers.replicas
    first.tell_requests(5)
    first.tell(loads={"m-0": SharedLoad(in_flight=2)})
    first.due = {POOL.id: REPORT}
    await routers.exchange()
    assert second.requests == 5
    assert [update.loads for _, _, update, _ in second.heard if update.loads] == [{"m-0": SharedLoad(in_flight=2)}]
    assert [(pool, peer) for pool, peer, _, _ in second.reports_heard] == [(POOL.id, "router-0")]
    assert not first.requests
    assert second.peers


async def test_routers_without_a_connection_go_on_alone() -> None:
    routers = Routers()
    routers.connected = False
    routers.replicas[0].tell_requests(5)
    await routers.exchange()
    assert routers.replicas[1].requests == 0


async def test_post_of_each_pool_fits_in_one_message() -> None:
    shared: list[bytes] = []
    store = PeersStore(shared.append, lambda _: True, time.monotonic)
    loads = {f"{number:0>253}": SharedLoad(in_flight=1) for number in range(LOADS_MAX)}
    posts = [replace(POST, pool=pool, loads=loads) for pool in ("ns/one", "ns/two")]
    await store.publish("router-0", posts)
    assert all(len(encode_shared(payload)) <= MESSAGE_BYTES_MAX for payload in shared)

    other = PeersStore(shared.append, lambda _: True, time.monotonic)
    for payload in shared:
        other.on_shared("router-0", payload)
    for answer in await other.read("router-1", [Question(pool=each.pool, window_s=300.0) for each in posts]):
        assert [entry.loads for entry in answer.loads] == [loads]
        assert [entry.report for entry in answer.reports] == [REPORT]
        assert [entry.update.placements for entry in answer.entries] == [UPDATE.placements]


async def test_state_of_a_removed_pool_is_forgotten() -> None:
    served = {POOL.id}
    store = PeersStore(lambda _: None, lambda pool: pool in served, time.monotonic)
    question = Question(pool=POOL.id, window_s=300.0, wanted=(1,))
    store.on_shared("router-0", encode_post(POST))
    binding = SharedBinding(session=1, host="m-0", tokens=1, version=1, moved_ago_s=0.0)
    await store.resolve([Claim(pool=POOL.id, ttl_s=60.0, bindings=(binding,))])
    served.clear()
    await store.read("router-1", [])
    served.add(POOL.id)
    (answer,) = await store.read("router-1", [question])
    assert (answer.entries, answer.loads, answer.reports, answer.bindings) == ((), (), (), ())


async def test_posts_about_unknown_pools_and_unreadable_ones_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    routers = Routers()
    store = routers.stores[1]
    store.on_shared("router-0", encode_post(replace(POST, pool="ns/unknown")))
    store.on_shared("router-0", b"junk")
    questions = [Question(pool=pool, window_s=300.0) for pool in (POOL.id, "ns/unknown")]
    answers = await store.read("router-1", questions)
    assert all(not answer.entries and not answer.loads for answer in answers)
    assert "Ignoring unreadable state of another router" in caplog.text
