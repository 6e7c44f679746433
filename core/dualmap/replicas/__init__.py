"""The values that router replicas send each other, and the sum of the other replicas' load.

May import nothing of the core but errors, so that the rooms above can use these values.
"""
