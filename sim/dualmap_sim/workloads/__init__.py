"""Workloads: what is asked of a pool, when, as values that the demo's load generator and the simulator both replay.

``trace`` holds the values and what can be done to them (windows, rates, caps), ``synthetic`` and ``mooncake`` make
them, ``statistics`` measures them, ``text`` turns block ids into prompts. Everything here is pure and deterministic.
"""
