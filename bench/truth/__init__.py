"""``python -m bench truth`` compares what a router can know about its engines' caches, and what this knowledge brings.

Every run has the same engines and requests. Only the router's knowledge differs: its own records, records that the
engines' usage corrects, or the engines' KV events. Round robin uses no knowledge. ``cases`` defines the runs,
``measures`` runs them in virtual time, ``tables`` and ``plot`` show the figures, and ``command`` is the command line.
``processes`` measures one case with processes and sockets.
"""
