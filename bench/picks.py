"""Measures the picker's CPU time per request: the pick, and the request's first token and end.

The pick includes parsing the body, hashing the prompt and choosing the member, but no gRPC. Half of each prompt is one
of eight system prompts. Each time is the tenth percentile, because other processes on the machine disturb the slower
samples. Envoy's messages and the gRPC server take several times as long (``gateway``).
"""

import random
import time

import orjson
from bench.decisions import pool_of, undisturbed_us

from dualmap.requests import Usage
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics

PROMPT_KB = (1, 12, 65)
MEMBERS = 8
BODIES = 200
ROUNDS = 20
INTERVAL_S = 0.05
TTFT_S = 0.03


def bodies(size: int) -> list[bytes]:
    chance = random.Random(5)

    def text() -> str:
        return "".join(chance.choices("abcdefghij klmnop ", k=size // 2))

    systems = [text() for _ in range(8)]
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


def cost(size: int) -> tuple[float, float]:
    """Return the microseconds of a pick, and of a first token together with the request's end."""
    observations = FanOut()
    Metrics(version="0", replica_id="bench").subscribe(observations)
    picker = Picker(Limits(), observations.report, id_prefix="bench")
    picker.set_pools(0.0, [pool_of(MEMBERS, "dualmap")])
    picks_s, events_s, now = [], [], 0.0
    for body in ROUNDS * bodies(size):
        now += INTERVAL_S
        usage = Usage(prompt_tokens=len(body) // 4, cached_tokens=0)
        began_s = time.thread_time()
        picked = picker.pick(now, body, None, now, headers={}, resume=lambda _: None)
        picked_s = time.thread_time()
        assert isinstance(picked, Picked)
        assert picked.request_id is not None
        picker.first_token(now + TTFT_S, picked.request_id)
        picker.finished(now + TTFT_S, picked.request_id, usage)
        events_s.append(time.thread_time() - picked_s)
        picks_s.append(picked_s - began_s)
    return undisturbed_us(picks_s), undisturbed_us(events_s)


def main() -> None:
    print("picks: microseconds of CPU per request")
    print("| prompt | pick | first token and end |")
    print("|---|---|---|")
    for size_kb in PROMPT_KB:
        pick_us, events_us = cost(size_kb * 1000)
        print(f"| {size_kb} KB | {pick_us:.0f} | {events_us:.0f} |")
    print()
