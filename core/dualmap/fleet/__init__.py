"""A pool's members in one router: load, speed, prefix index, suspension, and the other replicas' load.

``Fleet`` receives the events; ``Candidates`` and ``Capacity`` answer the chooser and the dispatcher. This package may
import queue and the packages that queue may import.
"""
