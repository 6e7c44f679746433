"""Measures how much CPU time shadow policies add to the picks of a router.

Each request is sent to two pickers in turn, of which one has shadow policies. Ten requests are picked together, because
on some machines it takes as long to read the clock as to pick. A round is 200 requests, and its result is the quotient
of both pickers' sums of CPU time. Other processes on the machine disturb single rounds, so the median of the rounds
counts; the quartiles show the noise. The rows without shadow policies compare two equal pickers.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Final

import click
from bench.decisions import pool_of
from bench.picks import Body, bodies

from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.requests import Usage
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics

SIZES_KB: Final = (1, 12, 65)
MEMBERS: Final = (8, 64)
SHADOWS: Final[Sequence[tuple[str, ...]]] = (
    (),
    ("llmd_default", "min_ttft"),
    ("dualmap_paper", "preble"),
    ("dynamo",),
)
SAMPLES: Final = (0.1, 1.0)
ROUNDS: Final = 20
TOGETHER: Final = 10


def new_picker(members: int, shadow: tuple[str, ...], sample: float) -> Picker:
    observations = FanOut()
    Metrics(version="0", replica_id="bench").subscribe(observations)
    picker = Picker(Limits(), observations.report, id_prefix="bench")
    pool = pool_of(members, "dualmap")
    picker.set_pools(0.0, [replace(pool, routing=replace(pool.routing, shadow=shadow, shadow_sample=sample))])
    return picker


def quotients(made: Sequence[Body], plain: Picker, other: Picker, rounds: int) -> list[float]:
    """Return the quotient of each round; the first round, in which the caches are cold, is left out."""
    tokens = len(made[0].body) // BYTES_PER_TOKEN
    prefill_s, usage = tokens / 2 / 7000.0, Usage(prompt_tokens=tokens, cached_tokens=tokens // 2)
    now, found = 0.0, []
    for _ in range(rounds + 1):
        spent_s = {plain: 0.0, other: 0.0}
        for number in range(0, len(made), TOGETHER):
            now += TOGETHER * prefill_s
            # The first picker of a turn reads the bodies into the processor's caches.
            for each in (plain, other) if number % (2 * TOGETHER) else (other, plain):
                spent_s[each] += picks_s(each, now, made[number : number + TOGETHER], prefill_s, usage)
            now += TOGETHER * prefill_s
        found.append(spent_s[other] / spent_s[plain])
    return found[1:]


def picks_s(picker: Picker, now: float, made: Sequence[Body], prefill_s: float, usage: Usage) -> float:
    """Return the CPU time of some picks; then report the first tokens and the ends of the requests."""
    began_s = time.thread_time()
    answers = [
        picker.pick_read(
            now,
            read_body(body.body, Api.UNKNOWN),
            None,
            now,
            size_bytes=len(body.body),
            headers={},
            resume=lambda _: None,
        )
        for body in made
    ]
    spent_s = time.thread_time() - began_s
    for number, picked in enumerate(answers, start=1):
        assert isinstance(picked, Picked)
        picker.first_token(now + number * prefill_s, picked.request_id)
        picker.finished(now + number * prefill_s, picked.request_id, usage)
    return spent_s


@click.command(help=__doc__)
@click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(min=4), help="Rounds per line.")
def command(rounds: int) -> None:
    print("the CPU time of a pick with shadow policies, by that without: median (quartiles)")
    print("| prompt | members | shadow policies | 10 % of the requests | all requests |")
    print("|---|---|---|---|---|")
    for size_kb in SIZES_KB:
        made, _ = bodies(1000 * size_kb)
        for members in MEMBERS:
            for shadow in SHADOWS:
                cells = [_cell(made, members, shadow, sample, rounds) for sample in SAMPLES]
                print(f"| {size_kb} KB | {members} | {', '.join(shadow) or 'none'} | {' | '.join(cells)} |", flush=True)


def _cell(made: Sequence[Body], members: int, shadow: tuple[str, ...], sample: float, rounds: int) -> str:
    found = quotients(made, new_picker(members, (), sample), new_picker(members, shadow, sample), rounds)
    low, median, high = quantiles(found, n=4)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"
