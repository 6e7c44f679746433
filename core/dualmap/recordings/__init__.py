"""The format of recordings of the router's traffic (docs/recordings.md): its values, and one JSON line for each value.

This package has no files, keys or clock: hashes are keyed before they arrive here. It imports the standard library and
lower layers of the core only.
"""
