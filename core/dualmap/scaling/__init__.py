"""How many members a pool's traffic needs: one router's share, and the sum over all routers.

May import fleet (the prefill model) and the rooms below it, never queue; no other module of the core imports it.
"""
