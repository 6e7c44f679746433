"""What an engine says about itself, as values and state machines without I/O.

This package may import pools and prompts. ``dualmap_extproc.engines`` sends the requests.
"""
