"""Processes, with or without a root file system, network namespace and user of their own.

May import: `kubelet.pod_spec`.
"""
