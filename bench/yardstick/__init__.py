"""A foreign yardstick: NVIDIA Dynamo's router in Dynamo's own replay, beside this router on an engine of equal cost.

Dynamo has a virtual environment of its own (``make .dynamo/.installed``). ``setting`` has the engine and the requests,
``dynamo_replay`` runs Dynamo, ``simulation`` runs this router, and ``decisions`` compares their decisions.
"""
