"""Converts request bodies into the token ids that an engine computes; the only home of fastokens and jinja2.

This package may import core, edge, names, and the values of ``request`` that its callers exchange with it.
"""
