"""The dashboard at ``http://ROUTER:9090/``: a live, read-only view of the pools (docs/dashboard.md).

``histories`` keeps a bounded history of each pool from observations. While a page is open, ``feed`` takes a snapshot of
the page's pool each second, and ``routes`` sends the snapshot. This package may import ``request`` and ``autoscaling``.
Only ``routes`` may import aiohttp.
"""
