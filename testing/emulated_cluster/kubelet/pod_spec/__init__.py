"""Interprets a pod's spec on this node: environment, users, volumes and their files.

May import: `api`.
"""
