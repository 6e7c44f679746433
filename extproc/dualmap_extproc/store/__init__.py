"""State that the routers of a pool share: prefix hotness, loads, placements, session bindings (docs/state.md).

``exchange`` transfers replication updates between the picker and a store ten times a second. ``memory`` and ``redis``
are the stores. No request waits for a store. This package may import the packages below ``request``. Only the module
``redis`` imports the Redis client.
"""
