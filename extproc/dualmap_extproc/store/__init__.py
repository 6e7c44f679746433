"""State that the routers of a pool share: prefix hotness, loads, placements, session bindings (docs/state.md).

``exchange`` carries replication updates between the picker and a store ten times a second; ``memory`` and ``redis`` are
the stores. No request waits for a store. Of the router it may import only the rooms below ``request``;
only ``redis`` imports the Redis client.
"""
