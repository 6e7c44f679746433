"""A node whose pods are local processes: registers, runs pods, reports their status.

May import: its own packages, `api` and `control_plane`.
"""
