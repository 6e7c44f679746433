"""The options that ``dualmap simulate`` and ``dualmap goodput`` share, in the order in which ``--help`` lists them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from dualmap_cli.running import plot_option
from dualmap_cli.simulate.engine_options import read_engine_file
from dualmap_cli.simulate.pool_option import read_pool
from dualmap_cli.simulate.values import REQUESTS_MOST, duration, factor, named_numbers, policies
from dualmap_sim.option_checks import FiniteFloatRange
from dualmap_sim.oracles import ORACLES
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import WORKLOADS

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

BOUNDS: Final = (
    "\b\nTheoretical bounds for --policy; they use knowledge that no router has:\n"
    + "\n".join(f"  {info.name:<16} {info.summary}" for info in ORACLES.values())
    + (
        "\n\nlimit and limit_pooled are single queues, first come, first served. In overload, a router that serves "
        "first the requests that can still meet the SLO can exceed them. limit_deadline uses that order, too, and "
        "bounds the share within the SLO near saturation."
    )
)
"""The help text of the bounds."""
_WORKLOAD: Final[tuple[Decorator, ...]] = (
    click.option(
        "--trace",
        "trace_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Replay this Mooncake JSONL file.",
    ),
    click.option(
        "--recording",
        metavar="PATH",
        type=click.Path(path_type=Path),
        help="Replay this recording of a router (`dualmap router --record`) at its own times. Its pool gives the "
        "settings of --pool, the policy, the number of instances and the SLO.",
    ),
    click.option(
        "--pool-name",
        metavar="NAMESPACE/NAME",
        help="Pool whose requests are replayed, if the recording has several.",
    ),
    click.option(
        "--scale",
        metavar="FACTOR",
        callback=factor,
        default="1x",
        show_default=True,
        help="Replay a recording with more or fewer sessions, such as 2x or 0.5x. Each session keeps its own times.",
    ),
    click.option(
        "--workload",
        type=click.Choice(list(WORKLOADS)),
        help="Replay a generated workload.  [default: default, a mix of conversations and tool-calling agents]",
    ),
    click.option(
        "--sessions/--no-sessions",
        default=None,
        help="Send session ids to the router. A trace has no session ids, so a prompt of a trace that begins with an "
        "earlier prompt gets the earlier prompt's session id.  [default: off for a trace]",
    ),
    click.option(
        "--requests",
        type=click.IntRange(1, REQUESTS_MOST),
        help="Number of requests to replay.  [default: 4000, or all requests of a shorter trace, or of a recording]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0),
        help="Number of warm-up requests, which the results leave out.  [default: 500, at most a quarter of all]",
    ),
)
_POOL: Final[tuple[Decorator, ...]] = (
    click.option(
        "--pool",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=read_pool,
        help="Take spec.routing, spec.engine and spec.slo from this file with one InferencePool object. --set and "
        "--model describe the real engines, and the pool what the router believes about them.",
    ),
    click.option(
        "--policy",
        "policies",
        metavar="POLICY[,POLICY]",
        callback=policies,
        help="Policies to compare, separated by commas. 'dualmap policies' lists all policies. The option also accepts "
        f"these theoretical bounds: {', '.join(ORACLES)}.  [default: the policy of --pool or --recording, or "
        "round_robin,dualmap]",
    ),
    click.option(
        "--instances",
        type=click.IntRange(1, 4096),
        help="Number of engines.  [default: the number of members of --pool or --recording, or 8]",
    ),
    click.option(
        "--prefill-instances",
        "prefillers",
        type=click.IntRange(0, 4095),
        default=0,
        show_default=True,
        help="Number of the --instances that are in a prefill pool, with one router. The router chooses one engine of "
        "each pool, and KV moves at the speed of the parameter pull (100000 tokens per second without --set "
        "pull=NUMBER).",
    ),
    click.option(
        "--model",
        type=click.Choice(list(PRESETS)),
        default="7b",
        show_default=True,
        help="Engine preset with speeds, memory and cache of each engine. The preset pd is prefill-only.",
    ),
    click.option(
        "--engine",
        "engine_file",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=read_engine_file,
        help="Take the engine's parameters from this file, which `dualmap fit` writes. --model gives those that are "
        "absent in it. If the file has members that differ, qwen-0, qwen-1, ... are these members.",
    ),
    click.option(
        "--set",
        "parameters",
        metavar="NAME=NUMBER",
        multiple=True,
        callback=named_numbers,
        help="Set a parameter of the engine model, such as c=500000, in place of the value of --engine and --model. "
        "Repeat the option for several parameters.",
    ),
    click.option(
        "--slow",
        metavar="MEMBER=SPEED",
        multiple=True,
        callback=named_numbers,
        help="Run one engine at a fraction of its speed, such as qwen-0=0.5. The engines are qwen-0, qwen-1, ..., or "
        "with `simulate --recording` the recorded members.",
    ),
    click.option(
        "--slo",
        "slo_ttft_s",
        metavar="DURATION",
        callback=duration(0.001, 3600.0),
        help="TTFT objective.  [default: that of --pool or --recording, or 5s]",
    ),
)
_ROUTERS: Final[tuple[Decorator, ...]] = (
    click.option(
        "--routers",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="Number of routers that share the requests.",
    ),
    click.option(
        "--decide",
        type=click.Choice(["owner", "local"]),
        default="owner",
        show_default=True,
        help="With several routers: the pool's owner decides for all of them, or each router decides by itself.",
    ),
    click.option(
        "--hop-delay",
        "hop_delay_s",
        metavar="DURATION",
        callback=duration(0.0, 60.0),
        default="1ms",
        show_default=True,
        help="With --decide owner: delay of a message between two routers.",
    ),
    click.option(
        "--kv-store",
        "store_tokens_per_s",
        metavar="TOKENS_PER_SECOND",
        type=click.FloatRange(1000.0, 10_000_000.0),
        help="Let the instances share a KV store that keeps every prompt, and from which each fetches this fast.",
    ),
    click.option(
        "--view-delay",
        "view_delay_s",
        metavar="DURATION",
        callback=duration(0.001, 60.0),
        default="100ms",
        show_default=True,
        help="Mean age of a router's data about other routers.",
    ),
    click.option(
        "--feedback-delay",
        "feedback_delay_s",
        metavar="DURATION",
        callback=duration(0.0, 60.0),
        default="0ms",
        show_default=True,
        help="Delay until a router receives a first token or a completion.",
    ),
    click.option(
        "--believed-speed",
        type=FiniteFloatRange(1.0, 1e9),
        help="Prefill speed in the pool's spec, in tokens per second.  [default: that of --pool, or the engine's real "
        "speed, parameter r]",
    ),
)
_OUTPUT: Final[tuple[Decorator, ...]] = (
    click.option(
        "--processes", type=click.IntRange(1, 1024), help="Number of parallel runs.  [default: one for each core]"
    ),
    plot_option(help="Write a chart to this file."),
    click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table."),
)


def with_options(*own: Decorator) -> Decorator:
    """Return a decorator that adds the shared options to a command; ``own`` follows the options of the workload."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed((*_WORKLOAD, *own, *_POOL, *_ROUTERS, *_OUTPUT)):
            command = option(command)
        return command

    return decorate
