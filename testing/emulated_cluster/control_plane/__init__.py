"""etcd, API server, controller manager and scheduler: builds them from Go modules and runs them as processes.

May import: `api`.
"""
