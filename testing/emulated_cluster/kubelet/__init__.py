"""A node whose pods are local processes: registers, runs pods, reports their status.

May import: the packages in this folder, `api` and `control_plane`.
"""
