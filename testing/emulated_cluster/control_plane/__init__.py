"""etcd, API server, controller manager and scheduler: built from Go modules, started and stopped as processes.

May import: `api`.
"""
