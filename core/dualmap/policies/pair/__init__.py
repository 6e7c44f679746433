"""Policies that choose within a request's pair of members: DualMap and its variants.

May import what ``policies`` may, ``situation`` and ``migration``; neither ``cache_and_load`` nor ``single_signal``.
"""
