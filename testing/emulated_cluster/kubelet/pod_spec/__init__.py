"""What a pod's spec means on this node: environment, users, volumes and their files.

May import: `api`.
"""
