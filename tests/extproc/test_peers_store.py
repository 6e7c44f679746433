"""Tests of the store that routers without Redis keep for each other."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedLoad
from dualmap_extproc.store.codec import UnreadableUpdate
from dualmap_extproc.store.contract import Post, Question
from dualmap_extproc.store.exchange import Exchange
from dualmap_extproc.store.peers_store import PeersStore, Unobserved, decode_posts, encode_posts
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
                self.stores[1 - number].on_shared(f"router-{number}", payload, 0.0)

        return PeersStore(share, lambda pool: pool == POOL.id, time.monotonic)

    async def exchange(self) -> None:
        for _ in range(2):
            for each in self.exchanges:
                assert await each.exchange()


@pytest.mark.parametrize(
    "post", [POST, replace(POST, update=None), replace(POST, loads=None, report=None), replace(POST, loads={})]
)
def test_decoded_posts_equal_the_encoded_ones(post: Post) -> None:
    assert decode_posts(encode_posts([post, replace(post, pool="ns/other")])) == (post, replace(post, pool="ns/other"))


@given(st.binary(max_size=200), st.integers(0, 300))
def test_other_bytes_are_unreadable(junk: bytes, cut: int) -> None:
    whole = encode_posts([POST])
    for data in (junk, whole[: min(cut, len(whole) - 1)], whole + b"\0"):
        with pytest.raises(UnreadableUpdate):
            decode_posts(data)


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


async def test_posts_about_unknown_pools_and_unreadable_ones_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    routers = Routers()
    store = routers.stores[1]
    store.on_shared("router-0", encode_posts([replace(POST, pool="ns/unknown")]), 0.0)
    store.on_shared("router-0", b"junk", 0.0)
    questions = [Question(pool=pool, window_s=300.0) for pool in (POOL.id, "ns/unknown")]
    answers = await store.read("router-1", questions)
    assert all(not answer.entries and not answer.loads for answer in answers)
    assert "Ignoring unreadable state of another router" in caplog.text
