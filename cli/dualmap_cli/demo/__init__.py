"""``dualmap demo``: a workload replayed through a real Envoy, once per policy, with what each policy made of it.

``command`` parses and prints, ``experiment`` runs one policy after another, ``stack`` knows which processes a run
needs and ``children`` keeps them, ``replay`` sends the load, ``sampling`` watches the router's load gauges, ``report``
does the sums and ``chart`` draws them.
"""
