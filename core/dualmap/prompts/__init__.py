"""From a request body to the chain of block hashes of its prompt.

May import errors.
"""
