"""Measures the picker's CPU time per request: the pick, and the request's first token and end.

The pick includes parsing the body, hashing the prompt and choosing the member, but no gRPC. Half of each prompt is one
of 64 system prompts. A request ends before the next arrives, after the time that its prefill takes.

Each request is sent to several pickers in turn, which know different things about the engines:

alone: nothing but the requests' usage, which agrees with the estimate of the prompt's tokens.
load: each engine's memory, its use and its requests, of which two came through no router.
counts: usage with a quarter more prompt tokens than estimated, so that each prompt is counted anew.
events: the blocks of the system prompts, from KV events, and the token ids of each request.

Rules of the policy take different times, and chance decides how often each applies, so compare picks by rule. Each time
is the tenth percentile, because other processes on the machine disturb the slower samples. Envoy's messages and the
gRPC server take several times as long (``gateway``).
"""

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import orjson
from bench.decisions import pool_of, undisturbed_us

from dualmap.engines.events import Batch, Stored
from dualmap.engines.profile import EngineProfile
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.engines.token_chain import pack_tokens
from dualmap.pools.pool import KvEvents
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.prompts.parity import TokenClass
from dualmap.requests import Usage
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.tokens import Tokens
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics

PROMPT_KB = (1, 12, 65, 220)
MEMBERS = 8
SYSTEM_PROMPTS = 64
LEAST_SHARE = 0.05
BODIES = 200
ROUNDS = 10
ENGINE_BLOCK = 16
_REQUESTS = TokenClass(model="m", api=Api.CHAT, has_tools=False)


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body and its token ids, of which the first ``system`` are those of its system prompt."""

    body: bytes
    ids: "array[int]"


@dataclass(slots=True)
class Subject:
    """One of the compared pickers: what it learns before each request, and its times by rule in seconds."""

    picker: Picker
    usage: Usage
    tell: Callable[[Picker, float], None]
    with_ids: bool = False
    picks_s: dict[str, list[float]] = field(default_factory=dict)
    events_s: dict[str, list[float]] = field(default_factory=dict)


def bodies(size: int) -> tuple[list[Body], list["array[int]"]]:
    """Return the bodies, and the token ids of the system prompts."""
    chance = random.Random(5)

    def text() -> str:
        return "".join(chance.choices("abcdefghij klmnop ", k=size // 2))

    def ids() -> "array[int]":
        return array("I", chance.choices(range(100_000), k=size // 2 // BYTES_PER_TOKEN))

    systems = [(text(), ids()) for _ in range(SYSTEM_PROMPTS)]
    made = []
    for _ in range(BODIES):
        system, system_ids = chance.choice(systems)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text()}]
        made.append(Body(orjson.dumps({"model": "m", "stream": True, "messages": messages}), system_ids + ids()))
    return made, [each for _, each in systems]


def new_picker(*, events: bool = False) -> Picker:
    observations = FanOut()
    Metrics(version="0", replica_id="bench").subscribe(observations)
    picker = Picker(Limits(), observations.report, id_prefix="bench")
    pool = pool_of(MEMBERS, "dualmap")
    picker.set_pools(0.0, [replace(pool, engine=replace(pool.engine, kv_events=KvEvents(enabled=events)))])
    return picker


def subjects(tokens: int, systems: "list[array[int]]") -> list[Subject]:
    usage = Usage(prompt_tokens=tokens, cached_tokens=tokens // 2)
    more = Usage(prompt_tokens=tokens * 5 // 4, cached_tokens=tokens * 5 // 8)
    with_events = new_picker(events=True)
    pool = with_events.pools[0]
    live = SourceStatus(state=SourceState.LIVE, sequence=0)
    for member in pool.members:
        batch, stored = [], 0
        for ids in systems:
            blocks = len(ids) // ENGINE_BLOCK
            packed = pack_tokens(ids[: blocks * ENGINE_BLOCK])
            hashes = tuple(range(stored, stored + blocks))
            batch.append(Stored(hashes=hashes, parent=None, tokens=packed, block_tokens=ENGINE_BLOCK))
            stored += blocks
        with_events.on_kv_events(pool.id, member.id, 0, [Batch(events=tuple(batch))], live)
    # In the order of the module's docstring.
    return [
        Subject(new_picker(), usage, nothing),
        Subject(new_picker(), usage, load),
        Subject(new_picker(), more, nothing),
        Subject(with_events, usage, nothing, with_ids=True),
    ]


def nothing(_picker: Picker, _now: float) -> None:
    pass


def load(picker: Picker, now: float) -> None:
    """Report what every engine says, before each request."""
    pool = picker.pools[0]
    for member in pool.members:
        profile = EngineProfile(waiting=0, running=2, kv_tokens=500_000, kv_usage=0.1, cache_tokens=1_000_000)
        picker.on_profile(now, pool.id, member.id, profile)


def measure(size: int) -> list[Subject]:
    """Return the pickers with the times of each pick, and of each first token together with the request's end."""
    made, systems = bodies(size)
    compared = subjects(size // BYTES_PER_TOKEN, systems)
    # The members have cached the system prompts.
    prefill_s = size // BYTES_PER_TOKEN / 2 / compared[0].picker.pools[0].engine.prefill_tokens_per_second
    now = 0.0
    for number, body in enumerate(ROUNDS * made):
        now += prefill_s
        # The first picker of a turn reads the body into the processor's caches.
        first = number % len(compared)
        for each in compared[first:] + compared[:first]:
            each.tell(each.picker, now)
            send(each, now, body, prefill_s)
        now += prefill_s
    return compared


def send(of: Subject, now: float, body: Body, prefill_s: float) -> None:
    tokens = Tokens(body.ids, _REQUESTS) if of.with_ids else None
    began_s = time.thread_time()
    picked = of.picker.pick_read(
        now,
        read_body(body.body, Api.UNKNOWN),
        None,
        now,
        size_bytes=len(body.body),
        headers={},
        resume=lambda _: None,
        tokens=tokens,
    )
    picked_s = time.thread_time()
    assert isinstance(picked, Picked)
    assert picked.decision is not None
    of.picker.first_token(now + prefill_s, picked.request_id)
    of.picker.finished(now + prefill_s, picked.request_id, of.usage)
    rule = picked.decision.receipt.rule
    of.events_s.setdefault(rule, []).append(time.thread_time() - picked_s)
    of.picks_s.setdefault(rule, []).append(picked_s - began_s)


def main() -> None:
    print("picks: microseconds of CPU per request: pick + first token and end, and the rule's share")
    print("| prompt | rule | alone | load | counts | events |")
    print("|---|---|---|---|---|---|")
    for size_kb in PROMPT_KB:
        compared = measure(size_kb * 1000)
        for rule in sorted({rule for each in compared for rule in each.picks_s}):
            cells = [cell(each, rule) for each in compared]
            if any(cells):
                print(f"| {size_kb} KB | {rule} | {' | '.join(cells)} |")
    print()


def cell(of: Subject, rule: str) -> str:
    picks_s = of.picks_s.get(rule, [])
    share = len(picks_s) / (ROUNDS * BODIES)
    if share < LEAST_SHARE:
        return ""
    return f"{undisturbed_us(picks_s):.0f} + {undisturbed_us(of.events_s[rule]):.0f} ({share:.0%})"
