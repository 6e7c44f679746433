"""The dashboard at ``http://ROUTER:9090/``: a live, read-only view of the pools (docs/dashboard.md).

``histories`` keeps a bounded past of each pool from observations. While a page is open, ``feed`` takes a snapshot of
its pool each second and ``routes`` sends it. May import ``request``, ``autoscaling``; aiohttp in ``routes`` only.
"""
