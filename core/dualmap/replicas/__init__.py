"""The values that router replicas send to other replicas, and the sum of the other replicas' load.

This package may import only errors from the core, so that all other packages can use these values.
"""
