"""Processes of containers, with or without their own root file system, network namespace and user.

May import: `kubelet.pod_spec`.
"""
