"""What a shared KV store holds of a prompt: the names of its chunks, what is known of them, and whether to ask.

This package has no sockets: clients of stores ask for the keys that it names, and it keeps their answers for a short
time. It imports the standard library, xxhash and ``dualmap.pools``.
"""
