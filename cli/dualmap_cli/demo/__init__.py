"""``dualmap demo``: a workload replayed through a real Envoy, once per policy, with what each policy made of it.

``command`` parses and prints, ``folder`` keeps other demos out of the output folder, ``experiment`` runs one policy
after another, ``stack`` knows which processes a run needs and ``children`` keeps them, ``replay`` sends the load,
``sampling`` watches the router's load gauges, ``report`` does the sums, ``printing`` words them and ``chart`` draws
them. ``serve`` runs one of them on and on instead, for people to look at the dashboard.
"""
