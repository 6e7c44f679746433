"""Maps a prompt's chain to its pair of members: key length by hotness, hash rings, ring membership, sessions.

This package may import replicas, pools, prompts and errors.
"""
