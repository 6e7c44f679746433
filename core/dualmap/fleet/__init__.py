"""The members of a pool as one router knows them: load, speed, prefix index, suspension, and the other replicas' load.

``Fleet`` is the facade. May import queue and what queue may import.
"""
