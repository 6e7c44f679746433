"""A pool's members in one router: load, speed, prefix index, suspension, and the other replicas' load.

``Fleet`` is the facade. This package may import queue and the packages that queue may import.
"""
