"""The dashboard at ``http://ROUTER:9090/``: what an on-call engineer looks at, read-only and live.

``recorder`` is told of every request and keeps a bounded past of each pool (``history``); nothing else is done while
nobody looks. While somebody does, ``feed`` has ``snapshot`` describe the pool looked at once a second, with what is
wrong in words (``verdict``), and ``routes`` sends it as server-sent events to the page under ``static``.
docs/dashboard.md says what is shown and what it costs.
"""
