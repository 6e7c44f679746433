"""The requests that wait in the router: the queue of each member, who is next, and rebalancing within a pair.

May import requests, receipt, policies and the folders below them; never fleet, which composes these queues.
"""
