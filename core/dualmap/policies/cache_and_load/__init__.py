"""Policies of other systems that use cached prefixes and load of all members.

This package may import ``situation``, ``migration`` and the packages that ``policies`` may import, but not ``pair`` or
``single_signal``.
"""
