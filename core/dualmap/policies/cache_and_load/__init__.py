"""Policies of other systems that weigh cached prefixes against load over all members.

May import policies and keys.
"""
