"""``python -m bench paper``: the published evaluations again, on the router and the engine model that ship.

``sections`` says what each part measures and draws, ``settings`` what they have in common; ``cells`` is one
measurement, ``measures`` does it, ``results`` keeps it, ``tables`` and ``charts`` show it, ``command`` runs it all.
"""
