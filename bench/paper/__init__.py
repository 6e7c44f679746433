"""``python -m bench paper`` repeats the published evaluations with the real router and the engine model.

``sections`` defines what each part measures and draws, and ``settings`` their common settings. ``cells`` defines a
measurement, ``measures`` runs it, ``results`` stores it, ``tables`` and ``charts`` show it. ``command`` is the command
line.
"""
