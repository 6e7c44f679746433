"""Edge: code that the applications share outside the pure core: Kubernetes client, logs, ports, options.

This package may import ``dualmap`` (the core) and libraries, but no application.
"""
