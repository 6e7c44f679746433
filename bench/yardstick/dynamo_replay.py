"""Runs Dynamo's replay of a trace, and reads its report and its log."""

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from bench.yardstick.setting import (
    BLOCK_TOKENS,
    ENGINES,
    KV_BLOCKS,
    STEP_TOKENS,
    Costs,
    Served,
    mooncake_lines,
    write_profile,
)

from dualmap_sim.workloads.trace import Trace

INSTALL: Final = "make .dynamo/.installed"
_SECONDS: Final = 600.0
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_TERMS: Final = re.compile(
    r"Formula for worker_id=(?P<worker>\d+) .* with (?P<cached>[\d.]+) effective cached blocks: (?P<cost>[\d.]+) = .*"
    r" = [\d.]+ \* (?P<prefill>[\d.]+) \+ (?P<decode>[\d.]+) \+ [\d.]+ .*request_id=\"(?P<request>[^\"]+)\""
)


class DynamoError(Exception):
    """Dynamo's replay is missing, failed, or wrote a report that cannot be read; the message says what to do."""


class Router(StrEnum):
    """A router of Dynamo's replay."""

    ROUND_ROBIN = "round_robin"
    KV = "kv_router"
    KV_PREFILL = "kv_router, prefill blocks alone"
    """The KV router without decode blocks in its cost."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of Dynamo's replay."""
        if self is Router.KV_PREFILL:
            return "--router-mode", Router.KV, "--router-config", json.dumps({"router_track_active_blocks": False})
        return "--router-mode", self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What Dynamo's router compares for one worker, in blocks: ``cost`` = ``prefill`` + ``decode``."""

    cached: float
    prefill: float
    decode: float
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A request of Dynamo's report, with the time of its end, and the terms of each worker if they were logged."""

    served: Served
    finished_s: float
    terms: Mapping[int, Terms]


def replay(
    trace: Trace, router: Router, *, python: Path, folder: Path, costs: Costs, logged: bool = False
) -> list[Reported]:
    """Run Dynamo's replay of a paced trace; return its requests in order of arrival.

    With ``logged``, the log has the terms of each decision. Raises DynamoError.
    """
    if not python.exists():
        raise DynamoError(f"Dynamo is not installed: there is no {python}; run `{INSTALL}` (450 MB)")
    lines, report, profile = folder / "trace.jsonl", folder / "requests.jsonl", folder / "profile.npz"
    lines.write_text("\n".join(mooncake_lines(trace)) + "\n")
    arguments: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks": KV_BLOCKS,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    if costs is not Costs.MOCKER:
        write_profile(profile, costs)
        arguments["planner_profile_data"] = str(profile)
    command = [
        *(str(python), "-m", "dynamo.replay", str(lines), "--trace-format", "mooncake"),
        *("--num-workers", str(ENGINES), *router.options),
        *("--extra-engine-args", json.dumps(arguments)),
        *("--report-json", str(folder / "report.json"), "--report-jsonl", str(report)),
    ]
    environment = {**os.environ, "DYN_LOG": "warn,dynamo_kv_router::scheduling::selector=debug" if logged else "warn"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_SECONDS, check=False
        )
    printed = (folder / "log.txt").read_text().splitlines()
    if done.returncode:
        tail = "\n".join(printed[-5:])
        raise DynamoError(f"`{' '.join(command)}` ended with {done.returncode}:\n{tail}")
    return read_report(report.read_text().splitlines(), trace, terms=read_terms(printed))


def read_report(lines: Iterable[str], trace: Trace, *, terms: Mapping[str, Mapping[int, Terms]]) -> list[Reported]:
    """Return the requests of a report in the trace's order. Raises DynamoError if a request is missing or failed."""
    numbers = {round(each.arrival_s * 1e6): number for number, each in enumerate(trace.requests)}
    found: dict[int, Reported] = {}
    for line in lines:
        fields = json.loads(line)
        number = numbers.get(round(fields["arrival_time_ms"] * 1000))
        if number is None or fields["input_length"] != trace.requests[number].input_tokens:
            raise DynamoError(f"Dynamo's report has a request that the trace does not have: {line[:200]}")
        if fields["terminal_status"] != "completed":
            raise DynamoError(f"Dynamo did not serve request {number}: {fields['terminal_status']}")
        found[number] = Reported(
            served=Served(
                number=number,
                worker=fields["decode_worker_idx"],
                arrival_s=trace.requests[number].arrival_s,
                ttft_s=fields["ttft_ms"] / 1000,
                prompt_tokens=fields["input_length"],
                cached_tokens=fields["reused_input_tokens"],
            ),
            finished_s=fields["terminal_time_ms"] / 1000,
            terms=terms.get(fields["uuid"], {}),
        )
    if len(found) != len(trace.requests):
        raise DynamoError(f"Dynamo's report has {len(found)} of {len(trace.requests)} requests")
    return [found[number] for number in range(len(found))]


def read_terms(lines: Sequence[str]) -> dict[str, dict[int, Terms]]:
    """Return the terms of each decision in a log, by request id and worker."""
    terms: dict[str, dict[int, Terms]] = defaultdict(dict)
    for line in lines:
        match = _TERMS.search(_COLOURS.sub("", line))
        if match is not None:
            terms[match["request"]][int(match["worker"])] = Terms(
                cached=float(match["cached"]),
                prefill=float(match["prefill"]),
                decode=float(match["decode"]),
                cost=float(match["cost"]),
            )
    return dict(terms)
