"""What an engine reports about itself, as values and state machines without I/O.

This package may import ``dualmap.prompts``, ``dualmap.pools`` and xxhash. ``dualmap_extproc.engines`` sends the
requests.
"""
