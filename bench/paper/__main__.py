"""python -m bench.paper: see ``command.py``."""

from bench.paper.command import paper

paper(prog_name="python -m bench.paper")
