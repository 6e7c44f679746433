"""State that the routers of a pool share: prefix hotness, loads, placements, session bindings.

``exchange`` is the task that carries news between the picker and a store ten times a second, ``contract`` what it asks
of a store, ``memory`` and ``redis`` the two stores there are. A request never waits for any of this: decisions are
taken from the router's own state, into which the others' news is merged when it comes. docs/state.md has the keys.
"""
