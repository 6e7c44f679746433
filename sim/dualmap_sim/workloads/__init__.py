"""Workloads: requests with arrival times, for the demo's load generator and the simulator.

``catalog`` lists the workloads by name. ``trace`` defines traces and their transformations (windows, rates, caps).
``synthetic``, ``tool_agent``, ``agentic`` and ``zipf_bursts`` generate traces with the random numbers of ``draws``.
``mooncake`` reads recorded traces, and ``sessions`` finds their sessions. ``statistics`` compares traces with the
target figures, and ``text`` converts block ids into prompts. Everything here is pure and deterministic.
"""
