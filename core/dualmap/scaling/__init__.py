"""How many members a pool's traffic needs: one router's share, and the sum over all routers.

May import fleet (the prefill model), requests, replicas and pools; the router does not import it.
"""
