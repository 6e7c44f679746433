"""The requests that wait in the router: each member's queue, the queue's order, and rebalancing within a pair.

This package may import requests, receipt, policies and lower layers. The package may not import fleet, which uses these
queues.
"""
