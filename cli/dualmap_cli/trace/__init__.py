"""``dualmap trace``: shows, merges, exports and imports recordings of a router's traffic.

``dualmap_sim.recordings`` reads them. This package has the options, the output as text, JSON and charts, and may import
``dualmap_cli.running`` and everything below the command line.
"""
