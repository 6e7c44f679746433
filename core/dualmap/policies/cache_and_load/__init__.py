"""Policies of other systems that trade cached prefixes against load over all members.

May import what ``policies`` may, ``situation`` and ``migration``; neither ``pair`` nor ``single_signal``.
"""
