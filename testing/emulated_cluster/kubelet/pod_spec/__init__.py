"""Reads a pod's spec: environment, users, volumes and the volumes' files.

May import: `api`.
"""
