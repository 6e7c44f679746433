"""The router behind a real Envoy while clients send bodies that are slow to read.

``command`` measures and prints the tables. ``attackers`` and ``timed_router`` are programs of processes that it starts.
"""
