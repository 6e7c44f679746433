"""Tests of finding the other routers: by names, and by announcements in a real Redis."""

import asyncio
import socket

import pytest

from dualmap_extproc.peers.addresses import NamedAddresses
from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.announcement import Announcement, reachable_host
from dualmap_extproc.store.contract import Failure, StoreError
from dualmap_extproc.store.redis import ADDRESSES_KEY
from dualmap_extproc.store.target import Target, target_of
from extproc import redis_stores
from extproc.peer_routers import Router, connected
from extproc.redis_stores import opened
from waiting import until

shared_server = redis_stores.shared_server
server = redis_stores.server


class Names:
    """The answers of ``getaddrinfo``, by name; an exception is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **_: object):
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answer]


async def test_name_stands_for_all_its_current_addresses(monkeypatch, caplog):
    names = Names(monkeypatch)
    names.answers["routers"] = ["10.0.0.1", "10.0.0.2"]
    found = NamedAddresses([("routers", 9002), ("10.0.0.9", 9003), ("fd00::1", 9004)])
    others = [("10.0.0.9", 9003), ("fd00::1", 9004)]

    assert await found.find() == [("10.0.0.1", 9002), ("10.0.0.2", 9002), *others]
    names.answers["routers"] = ["10.0.0.3"]
    assert await found.find() == [("10.0.0.3", 9002), *others]
    names.answers["routers"] = socket.gaierror(-2, "Name or service not known")
    assert await found.find() == [("10.0.0.3", 9002), *others]
    assert caplog.messages == ["Cannot look up the name of a router"]


async def test_slow_lookup_does_not_delay_the_other_names(monkeypatch):
    names = Names(monkeypatch)
    monkeypatch.setattr("dualmap_extproc.peers.addresses._LOOKUP_S", 0.05)
    names.answers["routers"] = ["10.0.0.1"]
    asked = []

    async def answer(host: str, port: int, **options: object):
        asked.append(host)
        if host == "slow":
            await asyncio.Event().wait()
        return await names._answer(host, port, **options)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
    found = NamedAddresses([("slow", 9002), ("routers", 9002)])

    assert await found.find() == [("10.0.0.1", 9002)]
    assert await found.find() == [("10.0.0.1", 9002)]
    assert asked == ["slow", "routers", "routers"]
    for lookup in found._lookups.values():
        lookup.cancel()


@pytest.mark.parametrize(
    ("host", "target", "reachable"),
    [
        ("10.0.0.7", Target(host="127.0.0.1"), "10.0.0.7"),
        ("::1", Target(host="127.0.0.1"), "::1"),
        ("0.0.0.0", Target(host="127.0.0.1"), "127.0.0.1"),
        ("::", Target(host="127.0.0.1"), "127.0.0.1"),
        ("0.0.0.0", Target(path="/run/redis"), "127.0.0.1"),
        ("localhost", Target(host="127.0.0.1"), "127.0.0.1"),
    ],
)
def test_announced_host_is_concrete(host, target, reachable):
    assert reachable_host(host, target) == reachable


async def test_routers_find_each_other_in_redis(server):
    some = [Router(f"{letter}-1") for letter in "ab"]
    async with opened(server.url) as first, opened(server.url) as second:
        try:
            for router, store in zip(some, (first, second), strict=True):
                await router.listen()
                target = target_of(RedisSettings(url=server.url))
                announcement = Announcement(
                    store, name=router.name, host="0.0.0.0", port=router.address.port, target=target
                )
                router.find = announcement.find
                router.start()
            await until(lambda: connected(*some))
        finally:
            for router in some:
                await router.stop()


async def test_announcements_in_redis_expire_and_are_bounded(server):
    async with opened(server.url) as store:
        with server.admin as admin:
            for number in range(2000):
                admin.xadd(ADDRESSES_KEY, {"p": f"x-{number}", "a": f"10.0.0.1:{number}"})
            admin.xadd(ADDRESSES_KEY, {"p": "x"})
            found = await store.announce("a-1", "10.0.0.3:9002")
            assert found[0] == "10.0.0.3:9002"
            assert len(found) == 65
            assert admin.xlen(ADDRESSES_KEY) == 1024
            assert 0 < admin.pttl(ADDRESSES_KEY) <= 5000


async def test_oversized_announcement_is_removed(server):
    async with opened(server.url) as store:
        with server.admin as admin:
            admin.xadd(ADDRESSES_KEY, {"p": "x" * 600, "a": "10.0.0.2:1"})
            await store.announce("a-1", "10.0.0.3:9002")
            assert await store.announce("a-1", "10.0.0.3:9002") == ("10.0.0.3:9002",)


async def test_announcement_replaces_a_key_of_another_type_and_an_exhausted_stream(server):
    async with opened(server.url) as store:
        with server.admin as admin:
            admin.set(ADDRESSES_KEY, "text")
            assert await store.announce("a-1", "10.0.0.3:9002") == ("10.0.0.3:9002",)
            admin.xadd(ADDRESSES_KEY, {"p": "x"}, id=f"{2**64 - 1}-{2**64 - 1}")
            assert await store.announce("a-1", "10.0.0.3:9002") == ("10.0.0.3:9002",)


class Answers:
    """A store that returns announced addresses, or raises an error."""

    def __init__(self, *answers: tuple[str, ...] | StoreError) -> None:
        self.answers = list(answers)
        self.announced: list[tuple[str, str]] = []

    async def announce(self, name: str, address: str) -> tuple[str, ...]:
        self.announced.append((name, address))
        answer = self.answers.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer


async def test_announcement_keeps_the_last_addresses_while_the_store_is_lost():
    store = Answers(("10.0.0.1:9002", "[fd00::1]:9002"), StoreError(Failure.CONNECTION, "gone"))
    announcement = Announcement(store, name="a-1", host="10.0.0.1", port=9002, target=Target(host="127.0.0.1"))
    assert await announcement.find() == await announcement.find() == (("10.0.0.1", 9002), ("fd00::1", 9002))
    assert store.announced == [("a-1", "10.0.0.1:9002")] * 2


async def test_announcements_that_are_no_addresses_are_ignored():
    forged = ("", "10.0.0.1", "name:1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:-1", "[::1", "10.0.0.1:9" * 99)
    announcement = Announcement(
        Answers(forged), name="a-1", host="10.0.0.1", port=9002, target=Target(host="127.0.0.1")
    )
    assert await announcement.find() == ()
