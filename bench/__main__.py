"""python -m bench [NAME] [OPTIONS]: the benchmarks. Results are recorded in bench/results/.

  rings, decisions, memory   parts of core; without NAME, these three and picks run (5 minutes)

  picks                      the picker's CPU time per request (seconds)

  gateway                    the router behind a real Envoy (6 minutes; --quick: 2)

  hostile                    the router behind a real Envoy while clients send hostile bodies (3 minutes)

  tracing                    the cost of OpenTelemetry's spans in a router (seconds)

  transport                  the HTTP/2 server of ext_proc without sockets, beside h2 (a minute)

  tokens                     tokenizing prompts with the files of a model (a minute; needs --tokenizer FOLDER)

  profile                    the cost of asking engines for their profile and load (a minute)

  kv_events                  the cost of following engines' KV events (two minutes)

  peers                      messages between two routers on loopback (half a minute)

  window, replicas           the dispatch window and several routers, in virtual time (20 minutes; --quick: 1 to 3)

  routers                    goodput of one to eight routers, in virtual time (an hour; --quick: 5 minutes)

  truth                      what routers know about engines' caches, in virtual time (2 to 8 minutes; --quick: 1)

  autoscaling                scaling on the SLO, in virtual time (15 minutes; --quick: seconds)

  yardstick                  NVIDIA Dynamo's router in Dynamo's own replay beside this one (15 minutes; --quick: 2)

  paper                      the published evaluations, in virtual time (two hours; --quick: 5 minutes)

All benchmarks except the first four have a --help option: python -m bench gateway --help.
"""

import os
import sys

from bench import decisions, memory, picks, replicas, rings, routers, window

CORE = {"rings": rings.main, "decisions": decisions.main, "memory": memory.main, "picks": picks.main}
VIRTUAL = {"window": window.main, "replicas": replicas.main, "routers": routers.main}


def main(names: list[str]) -> None:
    """Run the named benchmarks; without names, run all benchmarks of core."""
    if names[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if names[:1] == ["gateway"]:
        # Imported here because Envoy's types take seconds to load, and core's benchmarks do not use them.
        from bench.gateway.command import gateway

        gateway(names[1:], prog_name="python -m bench gateway")
    if names[:1] == ["hostile"]:
        # Imported here for the same reason.
        from bench.hostile.command import hostile

        hostile(names[1:], prog_name="python -m bench hostile")
    if names[:1] == ["tracing"]:
        # Imported here because the module needs the extra `otlp`.
        from bench.tracing import main as tracing

        tracing(names[1:], prog_name="python -m bench tracing")
    if names[:1] == ["profile"]:
        # Imported here because the HTTP client takes a second to load.
        from bench.profile import main as profile

        profile(names[1:], prog_name="python -m bench profile")
    if names[:1] == ["kv_events"]:
        # Imported here because ZeroMQ is not needed elsewhere.
        from bench.kv_events import main as kv_events

        kv_events(names[1:], prog_name="python -m bench kv_events")
    if names[:1] == ["peers"]:
        # Imported here because gRPC takes a while to load.
        from bench.peers import main as peers

        peers(names[1:], prog_name="python -m bench peers")
    if names[:1] == ["transport"]:
        # Imported here because core's benchmarks do not need h2.
        from bench.transport import transport

        transport(names[1:], prog_name="python -m bench transport")
    if names[:1] == ["tokens"]:
        # Imported here for the same reason.
        from bench.tokens import main as tokens

        tokens(names[1:], prog_name="python -m bench tokens")
    if names[:1] == ["truth"]:
        # Imported here because a benchmark of engines' knowledge needs nothing that the others need.
        from bench.truth.command import truth

        truth(names[1:], prog_name="python -m bench truth")
    if names[:1] == ["autoscaling"]:
        # Imported here because the plotting library takes a second to load.
        from bench.autoscaling.command import autoscaling

        autoscaling(names[1:], prog_name="python -m bench autoscaling")
    if names[:1] == ["yardstick"]:
        # Imported here for the same reason.
        from bench.yardstick.command import yardstick

        yardstick(names[1:], prog_name="python -m bench yardstick")
    if names[:1] == ["paper"]:
        # Imported here because the plotting library takes a second to load.
        from bench.paper.command import paper

        paper(names[1:], prog_name="python -m bench paper")
    if names and names[0] in VIRTUAL:
        VIRTUAL[names[0]](names[1:], prog_name=f"python -m bench {names[0]}")
    unknown = [name for name in names if name not in CORE]
    if unknown:
        others = (
            "gateway",
            "hostile",
            "tracing",
            "profile",
            "tokens",
            "kv_events",
            "peers",
            "transport",
            "truth",
            "autoscaling",
            "paper",
        )
        names_known = ", ".join([*CORE, *VIRTUAL, *others])
        sys.exit(f"bench: {unknown[0]!r} is not a benchmark; give some of {names_known}, yardstick")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"machine: {os.cpu_count()} cores, load average {load} (times are comparable within this run only)\n")
    for name in names or CORE:
        print(f"running {name}", file=sys.stderr)
        CORE[name]()


main(sys.argv[1:])
