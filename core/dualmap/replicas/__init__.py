"""The values that router replicas send each other, and the sum of the other replicas' load.

May import nothing of the core but errors, so that every room can use these values.
"""
