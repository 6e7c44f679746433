"""Policies that choose within a request's pair of members: DualMap and its variants.

This package may import ``situation``, ``migration`` and the packages that ``policies`` may import, but not
``cache_and_load`` or ``single_signal``.
"""
