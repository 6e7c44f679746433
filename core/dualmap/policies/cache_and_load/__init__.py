"""Policies of other systems that trade cached prefixes against load over all members.

May import policies and keys.
"""
