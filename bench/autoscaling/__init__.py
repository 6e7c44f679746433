"""``python -m bench autoscaling`` compares scaling on the SLO with scaling on the queue and with fixed fleets.

It runs in virtual time, with the real router and scaling rule, the engine model, an HPA that follows Kubernetes'
algorithm, and pods that take two minutes to start. The load is the Conversation trace, paced by rate shapes; where the
trace is missing, the generated Tool&Agent workload replaces it. ``settings`` defines the measurements, ``measures``
runs them, ``shown`` makes the tables and the chart, and ``command`` is the command line. Cells, results and charts come
from ``bench.paper``; docs/autoscaling.md discusses the results.
"""
