"""Run: the process and its loops: leader election, kopf's handlers, reconcilers, HTTP ports, metrics.

May import every room but ``wiring`` and ``main``. The only room that imports kopf and prometheus_client.
"""
