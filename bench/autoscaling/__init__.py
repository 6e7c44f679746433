"""``python -m bench autoscaling``: scaling on the SLO beside scaling on the queue and beside fixed fleets.

In virtual time: the real router and rule, the engine model, an HPA as Kubernetes has it and pods that take two minutes
to start, under the Conversation trace paced by rate shapes (Tool&Agent, generated, where the trace is not to be had).
``settings`` says what is measured, ``measures`` does it, ``shown`` makes tables and a chart of it, ``command`` runs it
all. Cells, results and charts are the evaluation's (``bench.paper``); docs/autoscaling.md says what came out.
"""
