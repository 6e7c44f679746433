"""python -m bench [NAME] [OPTIONS]: the benchmarks. Results are recorded in bench/results/.

  rings, decisions, memory   of the core; all three (about five minutes) without a name
  gateway                    through a real Envoy (about six minutes; --quick: two)
  tracing                    what OpenTelemetry's spans cost a router (seconds)
  window, replicas           in virtual time (about twenty minutes; --quick: a minute or three)
  autoscaling                scaling on the SLO, in virtual time (about a quarter of an hour; --quick: seconds)
  paper                      the published evaluations in virtual time (about half an hour; --quick: two minutes)

The last five have options of their own: python -m bench gateway --help.
"""

import os
import sys

from bench import decisions, memory, replicas, rings, window

CORE = {"rings": rings.main, "decisions": decisions.main, "memory": memory.main}
VIRTUAL = {"window": window.main, "replicas": replicas.main}


def main(names: list[str]) -> None:
    """Run the named benchmarks; without names, all of the core's."""
    if names[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if names[:1] == ["gateway"]:
        # Imported here, because loading Envoy's types takes seconds and the core's benchmarks do not use them.
        from bench.gateway.command import gateway

        gateway(names[1:], prog_name="python -m bench gateway")
    if names[:1] == ["tracing"]:
        # Imported here, because it needs the extra otlp.
        from bench.tracing import main as tracing

        tracing(names[1:], prog_name="python -m bench tracing")
    if names[:1] == ["autoscaling"]:
        # As paper's.
        from bench.autoscaling.command import autoscaling

        autoscaling(names[1:], prog_name="python -m bench autoscaling")
    if names[:1] == ["paper"]:
        # Imported here, because loading the plotting library takes a second.
        from bench.paper.command import paper

        paper(names[1:], prog_name="python -m bench paper")
    if names and names[0] in VIRTUAL:
        VIRTUAL[names[0]](names[1:], prog_name=f"python -m bench {names[0]}")
    unknown = [name for name in names if name not in CORE]
    if unknown:
        names_known = ", ".join([*CORE, *VIRTUAL, "gateway", "tracing", "autoscaling"])
        sys.exit(f"bench: {unknown[0]!r} is not a benchmark; give some of {names_known}, paper")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"machine: {os.cpu_count()} cores, load average {load} (times are comparable within this run only)\n")
    for name in names or CORE:
        print(f"running {name}", file=sys.stderr)
        CORE[name]()


main(sys.argv[1:])
