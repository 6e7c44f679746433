"""Request bodies to prompts: the fields that count, their canonical text, and the hashes of its blocks.

May import ``dualmap.errors`` and xxhash.
"""
