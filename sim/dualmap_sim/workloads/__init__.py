"""Workloads: requests with arrival times, for the demo's load generator and the simulator.

``catalog`` lists the workloads by name. ``trace`` defines traces and their transformations (windows, rates, caps).
``synthetic``, ``tool_agent``, ``agentic``, ``zipf_bursts`` and ``poisson_chats`` generate traces with the random
numbers of ``draws`` and the growing sessions of ``traffic``. ``mooncake`` reads recorded traces, and ``sessions`` finds
their sessions. ``statistics`` compares traces with the target figures, and ``text`` converts block ids into prompts.
Everything here is pure and deterministic.
"""
