"""``python -m bench [rings|decisions]``: benchmarks of the core. Results are recorded in bench/results/."""

import os
import sys

from bench import decisions, rings

BENCHES = {"rings": rings.main, "decisions": decisions.main}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        sys.exit(f"bench: no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"machine: {os.cpu_count()} cores, load average {load} (times are comparable within this run only)\n")
    for name in names or BENCHES:
        BENCHES[name]()


main(sys.argv[1:])
