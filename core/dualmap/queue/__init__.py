"""The requests that wait in the router: the queue of each member, its order, and rebalancing within a pair.

May import requests, receipt, policies and the folders below them; never fleet, which composes these queues.
"""
