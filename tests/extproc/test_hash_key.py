"""The key of prompts' hashes: crafted prompts, ``--hash-key-file``, and routers that share a key."""

import json

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from xxhash import xxh3_64_intdigest

from crafted_prompts import BLOCK_TOKENS, crafted_ids
from dualmap.pools.pool import Prefix
from dualmap.prompts.blocks import PUBLIC_KEY, chain_root
from dualmap_cli.explain.command import explain
from dualmap_extproc.app.main import router
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from extproc.desks import Desk
from extproc.envoy_messages import (
    NO_WAIT,
    chat,
    headers_set,
    logging_as_it_was,
    pool,
    request_body,
    request_headers,
    response_headers,
)
from extproc.router_processes import Router, running, stream, write_pool
from redis_server import redis_server

SECRET = b"a secret of the routers"
VICTIM, ATTACKER = "tenant-b", "tenant-a"
PROMPT = list(range(1000, 1640))


class TestCrafted:
    """A client guesses another tenant's salt and prompt, and crafts a prompt with the same hashes."""

    def matched(self, picker: Picker, token_ids: list[int]) -> int:
        """Return how much of the attacker's prompt matches after the victim's prompt."""
        picker.set_pools(0.0, [pool(prefix=Prefix(block_tokens=BLOCK_TOKENS))])
        for salt, prompt in ((VICTIM, PROMPT), (ATTACKER, token_ids)):
            body = json.dumps({"model": "m", "prompt": prompt, "cache_salt": salt}).encode()
            picked = picker.pick(1.0, body, None, 1.0, headers={}, resume=lambda _: None)
            assert picked.decision is not None
        assert picked.decision.receipt.prompt_tokens == len(PROMPT)
        return picked.decision.receipt.matched_tokens

    def test_crafted_prompt_without_a_keyed_hash_matches_nothing(self):
        def root(salt: str) -> int:
            return xxh3_64_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in (b"m", b"", salt)))

        crafted = crafted_ids(PROMPT, root(VICTIM.encode()), root(ATTACKER.encode()))

        assert self.matched(Desk().picker, crafted) == 0

    def test_crafted_prompt_with_the_key_matches_the_whole_prompt(self):
        roots = (chain_root(model="m", cache_salt=salt, key=PUBLIC_KEY) for salt in (VICTIM, ATTACKER))

        assert self.matched(Desk().picker, crafted_ids(PROMPT, *roots)) == len(PROMPT)

    def test_crafted_prompt_with_another_key_matches_nothing(self):
        roots = (chain_root(model="m", cache_salt=salt, key=PUBLIC_KEY) for salt in (VICTIM, ATTACKER))
        picker = Picker(Limits(), lambda _: None, id_prefix="r", hash_key=SECRET)

        assert self.matched(picker, crafted_ids(PROMPT, *roots)) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; give a file with at least 16 random bytes"),
        (b"", "has only 0 bytes"),
        (b"fifteen bytes..\r\n", "has only 15 bytes; give a file with at least 16 random bytes, such as from: openssl"),
    ],
)
def test_hash_key_file_missing_or_short_exits_with_status_and_reason(tmp_path, content, said):
    pool_file, key = write_pool(tmp_path / "pool.yaml"), tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    options = ("--pool", str(pool_file), "--hash-key-file", str(key))

    with logging_as_it_was():
        results = (
            CliRunner().invoke(router, options),
            CliRunner().invoke(explain, [*options, "--request", "-"], input=chat()),
        )

    for result in results:
        assert result.exit_code == 2
        assert f"Invalid value for '--hash-key-file': {key}: " in result.stderr
        assert said in result.stderr


def test_hash_key_file_unreadable_exits_with_status_and_reason(tmp_path):
    pool_file = write_pool(tmp_path / "pool.yaml")

    result = CliRunner().invoke(router, ["--pool", str(pool_file), "--hash-key-file", str(tmp_path)])

    assert result.exit_code == 2
    assert f"Invalid value for '--hash-key-file': {tmp_path}: Is a directory; give a file" in result.stderr


@pytest.mark.parametrize(
    ("options", "public"),
    [
        (("--pool", "pool.yaml"), False),
        (("--pool", "pool.yaml", "--redis", "redis://c"), True),
        (("--kube",), True),
        (("--kube", "--redis", "redis://c"), True),
    ],
)
def test_router_without_key_file_has_a_random_key_only_if_it_is_alone(monkeypatch, options, public):
    keys = []
    monkeypatch.setattr("dualmap_extproc.app.wiring.run", lambda settings: keys.append(settings.hash_key) or 0)

    with logging_as_it_was():
        for _ in range(2):
            assert CliRunner().invoke(router, options).exit_code == 0

    assert [key == PUBLIC_KEY for key in keys] == [public, public]
    assert (keys[0] == keys[1]) == public


@pytest.fixture(name="pool_file")
def _pool_file(tmp_path):
    return write_pool(tmp_path / "pool.yaml", members=8)


def key_file(tmp_path, name="key", content=b"0123456789abcdef\n"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def explained(pool_file, *options: str) -> list[tuple[str, ...]]:
    """Return the pairs that ``dualmap explain`` names for some prompts."""
    arguments = ["--pool", str(pool_file), "--request", "-", "--json", *options]
    results = [CliRunner().invoke(explain, arguments, input=chat(f"prompt {n}")) for n in range(8)]
    return [tuple(json.loads(each.stdout)["pair"]) for each in results]


async def pairs(served: Router) -> list[tuple[str, ...]]:
    """Return the pairs that a router names for the same prompts."""
    found = []
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        for n in range(8):
            call = stream(channel)
            for message in (request_headers(NO_WAIT), request_body(chat(f"prompt {n}"))):
                await call.write(message)
            # Another router may decide, so the answers to headers and body may take a moment.
            for _ in range(2):
                await call.read()
            await call.write(response_headers())
            receipt = headers_set(await call.read())["x-dualmap-decision"]
            found.append(tuple(receipt.partition("pair=(")[2].partition(")")[0].replace('"', "").split()))
            call.cancel()
    return found


async def warnings_of(served: Router) -> list[str]:
    """End a router; return its log's warnings that the hash key is public."""
    served.stop()
    assert await served.exited() == 0
    assert served.process.stderr is not None
    return [
        line for line in (await served.process.stderr.read()).decode().splitlines() if "The hash key is public" in line
    ]


async def test_single_router_without_key_file_has_a_random_key(pool_file):
    async with running(pool_file) as one, running(pool_file) as other:
        found = [await pairs(each) for each in (one, other)]
        assert await warnings_of(one) == []

    assert found[0] != found[1] != explained(pool_file) != found[0]


async def test_replicas_with_one_key_file_agree_on_pairs(pool_file, tmp_path):
    one_file, other_file = key_file(tmp_path), key_file(tmp_path, "copy", b"0123456789abcdef")
    third_file = key_file(tmp_path, "third", b"another key, as long as needed")
    with redis_server(tmp_path / "redis") as redis:
        options = ("--redis", redis.url, "--hash-key-file")
        async with (
            running(pool_file, options=(*options, str(one_file))) as one,
            running(pool_file, options=(*options, str(other_file))) as other,
            running(pool_file, options=(*options, str(third_file))) as third,
        ):
            found = [await pairs(each) for each in (one, other, third)]
            assert await warnings_of(one) == []

    assert found[0] == found[1] == explained(pool_file, "--hash-key-file", str(one_file))
    assert found[0] != found[2]


async def test_replica_without_key_file_uses_the_public_key_and_warns_once(pool_file, tmp_path):
    with redis_server(tmp_path / "redis") as redis:
        async with running(pool_file, options=("--redis", redis.url)) as served:
            found = await pairs(served)
            (warning,) = await warnings_of(served)

    assert found == explained(pool_file)
    assert "--hash-key-file" in warning
