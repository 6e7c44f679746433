"""Run: the process with its leader election, kopf handlers, reconcilers, HTTP ports and metrics.

This package may import every layer except ``wiring`` and ``main``. Only this package imports kopf and
prometheus_client.
"""
