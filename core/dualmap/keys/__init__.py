"""From a prompt's chain to its pair of members: key length by hotness, hash rings, ring membership, sessions.

May import replicas, pools, prompts and errors.
"""
