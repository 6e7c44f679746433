"""python -m bench.engine: see ``command.py``."""

from bench.engine.command import engine

engine(prog_name="python -m bench.engine")
