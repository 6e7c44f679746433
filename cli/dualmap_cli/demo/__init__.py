"""``dualmap demo``: replays a workload through a real Envoy, once per policy, and compares the policies.

``command`` parses the options and prints, and ``folder`` locks the output folder. ``experiment`` runs one policy after
another. ``stack`` starts the processes of a run, and ``children`` watches and stops them. ``replay`` sends the
requests, and ``sampling`` reads the router's load gauges. ``report`` computes the figures, ``printing`` formats them,
and ``chart`` draws them. ``serve`` instead runs one policy without end, for the dashboard.
"""
