"""Which of several routers decides for a pool, and the messages between the routers.

Of the live routers, one owns a pool: it decides for all of them, with one queue and one account of the members' loads.
This package may import the values of requests only.
"""
