"""Converts request bodies into prompts: selects the relevant fields, builds canonical text, and hashes its blocks.

This package may import ``dualmap.errors`` and xxhash.
"""
