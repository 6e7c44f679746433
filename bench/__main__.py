"""python -m bench [NAME] [OPTIONS]: the benchmarks. Results are recorded in bench/results/."""

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its module, its help, and the name of its function.

    The modules are imported when they run, because some of them take seconds to load or need optional packages.
    """

    module: str
    about: str
    function: str = "main"

    def load(self) -> Any:
        """Return the benchmark's function, a click command except for those in ``CORE``."""
        return getattr(import_module(self.module), self.function)


CORE: Final = {
    "rings": Benchmark("bench.rings", "balance and cost of the rings"),
    "decisions": Benchmark("bench.decisions", "the cost of a decision, for every policy"),
    "memory": Benchmark("bench.memory", "the memory of the prefix index"),
    "picks": Benchmark("bench.picks", "the picker's CPU time per request"),
}
"""Without a name, these run: about five minutes."""
COMMANDS: Final = {
    "gateway": Benchmark("bench.gateway.command", "the router behind a real Envoy (8 minutes; --quick: 3)", "gateway"),
    "hostile": Benchmark(
        "bench.hostile.command",
        "the router behind a real Envoy while clients send hostile bodies (3 minutes)",
        "hostile",
    ),
    "shares": Benchmark("bench.shares", "members' shares of answers that are not streamed (5 minutes)", "shares"),
    "tracing": Benchmark("bench.tracing", "the cost of OpenTelemetry's spans in a router (seconds)"),
    "transport": Benchmark(
        "bench.transport", "the HTTP/2 server of ext_proc without sockets, beside h2 (a minute)", "transport"
    ),
    "recording": Benchmark("bench.recording", "the cost of recording requests (a minute)", "recording"),
    "replay": Benchmark("bench.replay", "the router's whole work for a request without sockets (a minute)", "replay"),
    "commits": Benchmark("bench.commits", "what changes between two commits cost a request (a minute)", "command"),
    "chunks": Benchmark(
        "bench.chunks", "output chunks a second through one router process, without Envoy (a minute)", "command"
    ),
    "shadows": Benchmark("bench.shadows", "the cost of shadow policies in a router (three minutes)", "command"),
    "soak": Benchmark(
        "bench.soak", "the router's memory over a million requests without sockets (half an hour)", "command"
    ),
    "restarts": Benchmark(
        "bench.restarts",
        "memory and lost requests over restarts of the HTTP/2 server and renewals of its certificate (20 minutes)",
        "command",
    ),
    "tokens": Benchmark(
        "bench.tokens", "tokenizing prompts with the files of a model (a minute; needs --tokenizer FOLDER)"
    ),
    "profile": Benchmark("bench.profile", "the cost of asking engines for their profile and load (a minute)"),
    "kv_events": Benchmark("bench.kv_events", "the cost of following engines' KV events (two minutes)"),
    "kv_store": Benchmark(
        "bench.kv_store", "a KV store that engines share, in virtual time (20 minutes; --quick: 5)", "kv_store"
    ),
    "notices": Benchmark(
        "bench.notices", "pods that must stop within seconds, in virtual time (10 minutes; --quick: 3)", "notices"
    ),
    "session_moves": Benchmark(
        "bench.session_moves",
        "sessions that move with and without their KV, in virtual time (3 minutes)",
        "session_moves",
    ),
    "peers": Benchmark("bench.peers", "messages and decisions between two routers on loopback (a minute)"),
    "window": Benchmark("bench.window", "the dispatch window, in virtual time (20 minutes; --quick: 3)"),
    "prefill_decode": Benchmark(
        "bench.prefill_decode", "a joint pool beside prefill and decode apart, in virtual time (15 minutes; --quick: 1)"
    ),
    "replicas": Benchmark("bench.replicas", "several routers, in virtual time (20 minutes; --quick: 3)"),
    "routers": Benchmark(
        "bench.routers", "goodput of one to eight routers, in virtual time (an hour; --quick: 5 minutes)"
    ),
    "truth": Benchmark(
        "bench.truth.command",
        "what routers know about engines' caches, in virtual time (2 to 8 minutes; --quick: 1)",
        "truth",
    ),
    "autoscaling": Benchmark(
        "bench.autoscaling.command", "scaling on the SLO, in virtual time (15 minutes; --quick: seconds)", "autoscaling"
    ),
    "yardstick": Benchmark(
        "bench.yardstick.command",
        "NVIDIA Dynamo's router in Dynamo's own replay beside this one (15 minutes; --quick: 2)",
        "yardstick",
    ),
    "paper": Benchmark(
        "bench.paper.command", "the published evaluations, in virtual time (two hours; --quick: 5 minutes)", "paper"
    ),
}
"""Each has its own options."""


def usage() -> str:
    """Return the help."""
    lines = [f"  {name:<12} {each.about}" for name, each in CORE.items()]
    more = [f"  {name:<12} {each.about}" for name, each in COMMANDS.items()]
    return "\n".join(
        (
            __doc__ or "",
            "\nParts of core; without NAME, all of these run (5 minutes):\n",
            *lines,
            "\nWith options of their own, shown by python -m bench NAME --help:\n",
            *more,
        )
    )


def main(names: list[str]) -> None:
    """Run the named benchmarks; without names, run all benchmarks of core."""
    if names[:1] in (["--help"], ["-h"]):
        print(usage())
        return
    if names and names[0] in COMMANDS:
        COMMANDS[names[0]].load()(names[1:], prog_name=f"python -m bench {names[0]}")
        return
    unknown = [name for name in names if name not in CORE]
    if unknown:
        sys.exit(f"bench: {unknown[0]!r} is not a benchmark; give some of {', '.join([*CORE, *COMMANDS])}")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"machine: {os.cpu_count()} cores, load average {load} (times are comparable within this run only)\n")
    for name in names or CORE:
        print(f"running {name}", file=sys.stderr)
        CORE[name].load()()


if __name__ == "__main__":
    main(sys.argv[1:])
