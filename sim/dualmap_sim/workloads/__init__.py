"""Workloads: requests and their times, which the demo's load generator and the simulator replay.

``catalog`` has them by name. ``trace`` holds the values and what can be done to them (windows, rates, caps);
``synthetic``, ``tool_agent``, ``agentic`` and ``zipf_bursts`` generate them from ``draws``; ``mooncake`` reads recorded
ones and ``sessions`` labels those. ``statistics`` compares them with the requested figures, ``text`` turns block ids
into prompts. Everything here is pure and deterministic.
"""
