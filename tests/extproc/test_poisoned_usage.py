"""Usage under attack: one client among twenty sends requests for which an honest engine reports few cached tokens."""

from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count, cycle, islice
from random import Random
from typing import Any

import orjson
import pytest

from builders import members
from dualmap.pools.pool import Engine as EngineSettings
from dualmap.pools.pool import Model, Pool, Queue, Routing
from dualmap.requests import Usage
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_sim.prefix_cache import PrefixCache

BLOCK_BYTES = 512
"""128 tokens of four bytes, in the router and in the engine."""
MEMBERS = 8
CACHE_TOKENS = 112_000
TOKENS_PER_SECOND = 14_000.0
REQUESTS = 2000
EVERY_S = 0.04
HONEST = 19
SESSIONS = 6
HOSTILE = "hostile"
FAIRNESS = "x-gateway-inference-fairness-id"

Body = dict[str, Any]
Hostile = Callable[[Random], Iterator[Body]]
"""Yields the bodies of the hostile client."""


class VllmEngine:
    """What vLLM reports of a request: its prompt's tokens, and the tokens that it read from its cache.

    A prompt that begins with ``#`` has a token for every 1.5 bytes, any other prompt for every four bytes.
    """

    def __init__(self) -> None:
        self._cache = PrefixCache(CACHE_TOKENS // 128)

    def usage(self, body: Body) -> Usage:
        text = body["prompt"].encode()
        tokens_per_block = round(BLOCK_BYTES / 1.5) if text.startswith(b"#") else 128
        link = repr([body.get("cache_salt"), body.get("add_special_tokens"), body.get("unknown")]).encode()
        blocks = []
        for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
            link = blake2b(link + text[start : start + BLOCK_BYTES], digest_size=8).digest()
            blocks.append(int.from_bytes(link))
        reads = body.get("prompt_logprobs") is None and not (body.get("echo") and body.get("logprobs") is not None)
        cached = self._cache.match(blocks) if reads else 0
        self._cache.insert(blocks)
        return Usage(prompt_tokens=len(text) * tokens_per_block // BLOCK_BYTES, cached_tokens=cached * tokens_per_block)


class Site:
    """A router and eight engines. Engines serve in the order of arrival."""

    def __init__(self) -> None:
        self.picker = Picker(Limits(), lambda _: None, id_prefix="test")
        pool = Pool(
            namespace="llm",
            name="m",
            model=Model(name="m"),
            members=members(MEMBERS),
            ring_version=1,
            engine=EngineSettings(cache_tokens=CACHE_TOKENS, prefill_tokens_per_second=TOKENS_PER_SECOND),
            routing=Routing(queue=Queue(dispatch_window_s=float("inf"))),
        )
        self.picker.set_pools(0.0, [pool])
        self._engines = {member.endpoint: VllmEngine() for member in pool.members}
        self._free_s = dict.fromkeys(self._engines, 0.0)
        self._ends: list[tuple[float, int, str, Usage]] = []
        self._sequence = count()

    def ask(self, now: float, body: Body, client: str) -> Usage:
        while self._ends and self._ends[0][0] <= now:
            at_s, _, request_id, usage = heappop(self._ends)
            self.picker.first_token(at_s, request_id)
            self.picker.finished(at_s, request_id, usage)
        headers = {FAIRNESS: client} if client else {}
        encoded = orjson.dumps({"model": "m", "stream": True, **body})
        picked = self.picker.pick(now, encoded, None, now, headers=headers, resume=lambda _: None)
        assert isinstance(picked, Picked)
        endpoint = picked.destination.split(",")[0]
        usage = self._engines[endpoint].usage(body)
        assert usage.prompt_tokens is not None
        assert usage.cached_tokens is not None
        computed_s = (usage.prompt_tokens - usage.cached_tokens) / TOKENS_PER_SECOND
        self._free_s[endpoint] = max(self._free_s[endpoint], now) + computed_s
        heappush(self._ends, (self._free_s[endpoint], next(self._sequence), picked.request_id, usage))
        return usage


def text_of(chance: Random, tokens: int) -> str:
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens * 4))


class Conversations:
    """The honest clients' requests: several conversations of each client, which grow and then begin again."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        names = [(client, each) for client in range(HONEST) for each in range(SESSIONS)]
        self._first = {name: text_of(self._chance, 1024) for name in names}
        self._now = dict(self._first)

    def next(self) -> tuple[str, Body]:
        name = self._chance.randrange(HONEST), self._chance.randrange(SESSIONS)
        text = self._now[name] + text_of(self._chance, 256)
        self._now[name] = text if len(text) < 4 * 4096 else self._first[name]
        return f"honest-{name[0]}", {"prompt": text}


def hit_rate(hostile: Hostile | None, *, named: bool, seed: int) -> float:
    """Return the honest clients' hit rate: their cached tokens of all their prompt tokens.

    The hostile client sends one request before each request of the others. If ``named``, a header names each client.
    """
    site, honest = Site(), Conversations(seed)
    bodies = None if hostile is None else hostile(Random(seed))
    cached = prompts = 0
    for number in range(REQUESTS):
        now = number * EVERY_S
        if bodies is not None:
            site.ask(now, next(bodies), HOSTILE if named else "")
        client, body = honest.next()
        usage = site.ask(now + EVERY_S / 2, body, client if named else "")
        if number > REQUESTS // 4:
            cached += usage.cached_tokens or 0
            prompts += usage.prompt_tokens or 0
    return cached / prompts


HEADS = 12
"""The number of the hostile client's keys, which cover all members."""


def with_fields(*, names: int = 1, dense: bool = False, **fields: object) -> Hostile:
    """Return the attack that computes two prompts at a member, and asks for them again with other fields.

    The two prompts begin with the same two blocks, so that they go to the same two members. With several ``names``,
    each request has one of so many salts. A ``dense`` prompt has a token for every 1.5 bytes.
    """

    def bodies(chance: Random) -> Iterator[Body]:
        heads = ["#" * dense + text_of(chance, 256) for _ in range(HEADS)]
        pairs = [[head + text_of(chance, 512) for _ in range(2)] for head in heads]
        salts = [{"cache_salt": str(each)} for each in range(names)] if names > 1 else [{}]
        for pair in cycle(pairs):
            asked = [{"prompt": prompt, **salt} for prompt, salt in zip(pair, cycle(salts))]
            yield from asked
            yield from ({**each, **fields} for each in asked)

    return bodies


def mixture(chance: Random) -> Iterator[Body]:
    """Yield bodies of all other attacks, from each a few in a row."""
    attacks = [attack(chance) for attack in ATTACKS.values() if attack is not mixture]
    while True:
        yield from islice(chance.choice(attacks), 4 * chance.randrange(1, HEADS))


ATTACKS: dict[str, Hostile] = {
    "prompt_logprobs": with_fields(prompt_logprobs=0),
    "echo": with_fields(echo=True, logprobs=1),
    "special tokens": with_fields(add_special_tokens=False),
    "salts": with_fields(names=2, prompt_logprobs=0),
    "dense": with_fields(dense=True),
    "dense, prompt_logprobs": with_fields(dense=True, prompt_logprobs=0),
    "unknown field": with_fields(unknown=1),
    "unknown field and salts": with_fields(names=2, unknown=1),
    "mixture": mixture,
}


@cache
def quiet(named: bool, seed: int) -> float:
    return hit_rate(None, named=named, seed=seed)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_hit_rate_of_other_clients_stays(attack: str, named: bool) -> None:
    before, after = quiet(named, 1), hit_rate(ATTACKS[attack], named=named, seed=1)
    assert after > 0.97 * before
