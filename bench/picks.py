"""Measures the picker's CPU time per request: the pick, and the request's first token and end.

The pick includes parsing the body, hashing the prompt and choosing the member, but no gRPC. Half of each prompt is one
of 64 system prompts. A request ends before the next arrives, after the time that its prefill takes.

Rules of the policy take different times, and chance decides how often each applies, so compare picks by rule. Each time
is the tenth percentile, because other processes on the machine disturb the slower samples. Envoy's messages and the
gRPC server take several times as long (``gateway``).
"""

import random
import time

import orjson
from bench.decisions import pool_of, undisturbed_us

from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.requests import Usage
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics

PROMPT_KB = (1, 12, 65)
MEMBERS = 8
SYSTEM_PROMPTS = 64
LEAST_SHARE = 0.05
BODIES = 200
ROUNDS = 20


def bodies(size: int) -> list[bytes]:
    chance = random.Random(5)

    def text() -> str:
        return "".join(chance.choices("abcdefghij klmnop ", k=size // 2))

    systems = [text() for _ in range(SYSTEM_PROMPTS)]
    return [
        orjson.dumps(
            {
                "model": "m",
                "stream": True,
                "messages": [
                    {"role": "system", "content": chance.choice(systems)},
                    {"role": "user", "content": text()},
                ],
            }
        )
        for _ in range(BODIES)
    ]


def cost(size: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each pick by rule, and of each first token together with the request's end."""
    observations = FanOut()
    Metrics(version="0", replica_id="bench").subscribe(observations)
    picker = Picker(Limits(), observations.report, id_prefix="bench")
    pool = pool_of(MEMBERS, "dualmap")
    picker.set_pools(0.0, [pool])
    tokens = size // BYTES_PER_TOKEN
    # The members have cached the system prompts.
    prefill_s = tokens / 2 / pool.engine.prefill_tokens_per_second
    usage = Usage(prompt_tokens=tokens, cached_tokens=tokens // 2)
    picks_s: dict[str, list[float]] = {}
    events_s, now = [], 0.0
    for body in ROUNDS * bodies(size):
        now += prefill_s
        began_s = time.thread_time()
        picked = picker.pick(now, body, None, now, headers={}, resume=lambda _: None)
        picked_s = time.thread_time()
        assert isinstance(picked, Picked)
        assert picked.decision is not None
        now += prefill_s
        picker.first_token(now, picked.request_id)
        picker.finished(now, picked.request_id, usage)
        events_s.append(time.thread_time() - picked_s)
        picks_s.setdefault(picked.decision.receipt.rule, []).append(picked_s - began_s)
    return picks_s, events_s


def main() -> None:
    print("picks: microseconds of CPU per request")
    print("| prompt | rule | share | pick | first token and end |")
    print("|---|---|---|---|---|")
    for size_kb in PROMPT_KB:
        picks_s, events_s = cost(size_kb * 1000)
        for rule, each_s in sorted(picks_s.items()):
            share = len(each_s) / len(events_s)
            if share >= LEAST_SHARE:
                times = f"{undisturbed_us(each_s):.0f} | {undisturbed_us(events_s):.0f}"
                print(f"| {size_kb} KB | {rule} | {share:.0%} | {times} |")
    print()
