"""Tests of access to the Redis store: passwords, the documented permissions, TLS, and Redis Cluster."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from dualmap_extproc.store.contract import Failure, StoreError
from dualmap_extproc.store.redis import RedisStore
from dualmap_extproc.transport.tls import self_signed
from extproc import redis_stores
from extproc.redis_stores import POOL, POST, QUESTION, STREAM, answering, failure, opened, read, works, works_again
from redis_server import RedisServer, redis_cluster, redis_server

# This imports fixtures, which pytest finds by their names in this module.
shared_server = redis_stores.shared_server
server = redis_stores.server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), password="hidden@word") as running:
        yield running


class TestCredentials:
    async def test_redis_password_is_required_and_checked(self, guarded):
        with guarded.admin as admin:
            admin.flushall()
        async with opened(guarded.url, "hidden@word") as store:
            await works(store)
        for password in ("wrong", None):
            async with opened(guarded.url, password) as store:
                assert await failure(store) is Failure.DENIED

    async def test_documented_redis_rights_are_sufficient_and_necessary(self, guarded):
        words = documented_rights("other")[0]
        url = guarded.url.replace("redis://", "redis://router:other@")
        with guarded.admin as admin:
            admin.execute_command(*words)
            rights = [word for word in words if word.startswith("+")]
            async with opened(url) as store:
                await needs_every_right(store, admin)
            for right in rights:
                admin.execute_command("ACL", "SETUSER", "router", f"-{right[1:]}")
                async with opened(url) as store:
                    with pytest.raises(StoreError) as caught:
                        await needs_every_right(store, admin)
                    assert caught.value.failure is Failure.DENIED, right
                admin.execute_command("ACL", "SETUSER", "router", right)

    async def test_redis_errors_do_not_contain_the_password(self, guarded):
        url = guarded.url.replace("redis://", "redis://hidden@")
        async with opened(url, "hidden@wrong") as store:
            with pytest.raises(StoreError) as caught:
                await read(store)
        assert "hidden" not in repr(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    async def test_redis_response_with_the_password_is_masked(self):
        answer = b"-ERR unknown command `AUTH`, with args beginning with: `hidden-word`\r\n"
        async with answering(answer) as url, opened(url, "hidden-word") as store:
            with pytest.raises(StoreError, match=r"with args beginning with: `\*\*\*`"):
                await read(store)


def documented_rights(password: str) -> list[list[str]]:
    """Return the documented commands for a user's permissions: the basic commands, and the commands for a cluster."""
    document = (Path(__file__).parents[2] / "docs/state.md").read_text().splitlines()
    return [line.replace("PASSWORD", password).split() for line in document if line.startswith("ACL SETUSER router ")]


async def needs_every_right(store: RedisStore, admin: redis.Redis) -> None:
    admin.flushall()
    await works(store)
    await works_again(store, POOL)
    assert await store.announce("teller", "10.0.0.1:9002") == ("10.0.0.1:9002",)
    admin.delete(STREAM)
    admin.set(STREAM, "a string")
    await store.publish("teller", [POST])


class TestTls:
    @pytest.fixture
    async def front(self, server: RedisServer, tmp_path: Path) -> AsyncIterator[tuple[int, Path]]:
        """A TLS port in front of the server, and the file with the trusted certificate."""
        key, certificate = self_signed()
        (tmp_path / "tls.key").write_bytes(key)
        (tmp_path / "tls.crt").write_bytes(certificate)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(carry(reader, server_writer), carry(server_reader, writer))

        listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        async with listener:
            yield listener.sockets[0].getsockname()[1], tmp_path / "tls.crt"

    async def test_redis_tls_with_the_servers_ca_connects(self, front):
        port, ca_file = front
        async with opened(f"rediss://127.0.0.1:{port}", ca_file=ca_file) as store:
            await works(store)

    async def test_redis_tls_with_unknown_ca_is_rejected(self, front):
        async with opened(f"rediss://127.0.0.1:{front[0]}") as store:
            assert await failure(store) is Failure.CONNECTION

    async def test_redis_tls_with_another_host_name_is_rejected(self, front):
        port, ca_file = front
        async with opened(f"rediss://127.0.0.2:{port}", ca_file=ca_file) as store:
            assert await failure(store) is Failure.CONNECTION

    async def test_redis_tls_to_plain_text_server_is_rejected(self, server, front):
        async with opened(f"rediss://127.0.0.1:{server.port}", ca_file=front[1], is_patient=False) as store:
            assert await failure(store) in (Failure.CONNECTION, Failure.TIMEOUT)


class TestCluster:
    async def test_redis_cluster_serves_pools_on_several_nodes(self, tmp_path):
        # llm/a and llm/d are on different nodes of the cluster.
        pools = ("llm/a", "llm/b", "llm/c", "llm/d")
        with redis_cluster(tmp_path / "cluster") as nodes:
            for node in nodes:
                with node.admin as admin:
                    for words in documented_rights("other"):
                        admin.execute_command(*words)
            counts = []
            for node in nodes:
                for each in nodes:
                    with each.admin as admin:
                        admin.flushall()
                async with opened(node.url.replace("redis://", "redis://router:other@")) as store:
                    await works(store, pools)
                    for pool in pools:
                        await works_again(store, pool)
                with node.admin as admin:
                    counts.append(len(admin.keys()))
            assert sum(counts) == 4 * len(pools)
            assert 0 not in counts

    async def test_redis_cluster_with_lost_node_fails_in_bounded_time(self, tmp_path):
        with redis_cluster(tmp_path / "cluster") as nodes:
            async with opened(nodes[0].url, is_patient=False) as store:
                questions = [replace(QUESTION, pool=pool) for pool in ("llm/a", "llm/d")]
                await store.read("listener", questions)
                nodes[1].kill()
                with pytest.raises(StoreError) as caught:
                    await store.read("listener", questions)
                assert caught.value.failure in (Failure.CONNECTION, Failure.TIMEOUT)
