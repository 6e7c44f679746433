"""Edge: what router, operator and simulator share outside the pure core: Kubernetes client, logs, ports, options.

May import ``dualmap`` (the core) and libraries; never an application.
"""
