"""Asks the members' engines about themselves; the only package that sends requests to members.

This package may import core, edge and names, and no package that decides requests.
"""
