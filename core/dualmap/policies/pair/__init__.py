"""Policies that choose within a request's pair of members: DualMap and its variants.

May import policies and keys.
"""
