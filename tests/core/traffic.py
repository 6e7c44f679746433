"""Prompts from clients through routers to a pool's simulated engines, for the shares that the members get."""

import heapq
import random
from collections import Counter
from dataclasses import replace
from enum import IntEnum
from itertools import count

from builders import members, pool, request, text_of
from core.shared_routers import Routers
from dualmap.requests import Asked, Decision, Request, Usage
from dualmap.router import PoolRouter
from dualmap.shared_router import Router

SPEED = 14_000.0
"""The engines' speed in tokens per second, twice the speed that the pool's specification expects."""
OVERHEAD_S = 0.02
HIGH_LOAD = 0.8


def capacity(tokens: int, share: float) -> float:
    """Return a share of the requests per second that four engines serve."""
    return share * 4 / (OVERHEAD_S + tokens / SPEED)


class _Event(IntEnum):
    FIRST_TOKEN = 0
    END = 1
    USAGE = 2


OUTPUT_TOKENS = 100


class Traffic:
    """Prompts through routers, to engines that serve one prefill after the other with 5 % noise.

    Each request goes to a random router. No router has news from another, unless ``owner`` is true: then the pool's
    owner decides, and messages arrive at once. An answer that is not ``streamed`` ends without a first token, and its
    token counts arrive up to a second later, as in Envoy's access log. Decoding takes ``decode_s`` for OUTPUT_TOKENS.
    A member with a ``slowness`` prefills slower, and if ``decodes_slower``, it also decodes slower.
    """

    def __init__(
        self,
        routers: int = 1,
        *,
        owner: bool = False,
        streamed: bool = True,
        decode_s: float = 0.5,
        decodes_slower: bool = False,
        output_tokens: tuple[int, int] = (OUTPUT_TOKENS, OUTPUT_TOKENS),
        seed: int = 1,
    ) -> None:
        self._shared = Routers(pool(4), routers) if owner else None
        self.routers: list[Router] = [PoolRouter(pool(4)) for _ in range(routers)]
        if self._shared is not None:
            self.routers = list(self._shared.routers.values())
        self.slowness: dict[str, float] = {}
        self._streamed = streamed
        self._decode_s = decode_s
        self._decodes_slower = decodes_slower
        self._output_tokens = output_tokens
        self._random = random.Random(seed)
        self._now = 0.0
        self._free_s = Counter[str]()
        self._events: list[tuple[float, str, _Event, int, Router]] = []
        self._ids = count()
        self._chosen = Counter[str]()
        self._cached: set[tuple[str, str]] = set()

    def send(self, tokens: int, *, prompts: int | None = None) -> float:
        """Send a prompt now, a new one or one of ``prompts``; return the time of its first token."""
        name, router = f"{next(self._ids)}", self._random.choice(self.routers)
        prompt = name if prompts is None else f"prompt {self._random.randrange(prompts)}"
        asked = request(name, text_of(tokens, prompt), now=self._now)._replace(streamed=self._streamed)
        member = self._decision(router, asked).receipt.chosen
        self._chosen[member] += 1
        new_tokens = 0 if (member, prompt) in self._cached else tokens
        self._cached.add((member, prompt))
        slowness = self.slowness.get(member, 1.0)
        service_s = (OVERHEAD_S + new_tokens / SPEED) * slowness * self._random.uniform(0.95, 1.05)
        first_s = self._free_s[member] = max(self._now, self._free_s[member]) + service_s
        output_tokens = self._random.randint(*self._output_tokens)
        decode_s = self._decode_s * output_tokens / OUTPUT_TOKENS * (slowness if self._decodes_slower else 1.0)
        if self._streamed:
            self._later(first_s, name, _Event.FIRST_TOKEN, 0, router)
            self._later(first_s + decode_s, name, _Event.END, output_tokens, router)
        else:
            self._later(first_s + decode_s, name, _Event.END, 0, router)
            self._later(first_s + decode_s + self._random.random(), name, _Event.USAGE, output_tokens, router)
        return first_s

    def _later(self, at_s: float, name: str, event: _Event, tokens: int, router: Router) -> None:
        heapq.heappush(self._events, (at_s, name, event, tokens, router))

    def _decision(self, router: Router, asked: Request) -> Decision:
        answer = router.on_request(self._now, asked).answer
        if self._shared is not None and isinstance(answer, Asked):
            self._shared.now = self._now
            self._shared.deliver()
            return self._shared.decision(asked.id)
        assert isinstance(answer, Decision)
        return answer

    def poisson(self, rate: float, seconds: float, *, tokens: int, prompts: int | None = None) -> dict[str, float]:
        """Send prompts at random times; return each member's share as a multiple of the mean."""
        ends_s = self._now + seconds
        while (at_s := self._now + self._random.expovariate(rate)) < ends_s:
            self.advance(at_s)
            self.send(tokens, prompts=prompts)
        self.advance(ends_s)
        return self.shares()

    def one_by_one(self, number: int, *, tokens: int) -> dict[str, float]:
        """Send each prompt after the end of the one before; return the shares."""
        for _ in range(number):
            self.advance(self.send(tokens) + 0.6)
        return self.shares()

    def speeds(self) -> dict[str, float]:
        """Return the speed that the first router believes of each member."""
        return {each.id: each.prefill_tokens_per_second for each in self.routers[0].status().endpoints}

    def shares(self) -> dict[str, float]:
        chosen, self._chosen = self._chosen, Counter()
        ids = [each.id for each in self.routers[0].status().endpoints]
        return {each: chosen[each] * len(ids) / chosen.total() for each in ids}

    def advance(self, to_s: float) -> None:
        """Let the engines work until ``to_s``."""
        while self._events and self._events[0][0] <= to_s:
            at_s, name, event, output_tokens, router = heapq.heappop(self._events)
            usage = Usage(completion_tokens=output_tokens) if output_tokens else None
            match event:
                case _Event.FIRST_TOKEN:
                    router.on_first_token(at_s, name)
                case _Event.END:
                    router.on_finished(at_s, name, usage)
                case _Event.USAGE:
                    assert usage is not None
                    router.on_usage(at_s, name, usage)
            if self._shared is not None:
                self._shared.now = at_s
                self._shared.deliver()
        self._now = to_s

    def add_member(self) -> str:
        added = members(5)[-1]
        for router in self.routers:
            router.on_pool(self._now, replace(router.pool, members=members(5)))
        return added.id
