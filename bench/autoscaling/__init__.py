"""``python -m bench autoscaling`` compares scaling on the SLO with scaling on the queue and with fixed fleets.

The benchmark runs in virtual time, with the real router and scaling rule, and the engine model. The HPA follows
Kubernetes' algorithm, and pods take two minutes to start. The load is the Conversation trace, scaled by rate shapes. If
the trace is missing, the generated Tool&Agent workload replaces it. ``settings`` defines the measurements, and
``measures`` runs them. ``shown`` makes the tables and the chart, and ``command`` is the command line. Cells, results
and charts use ``bench.paper``. docs/autoscaling.md discusses the results.
"""
