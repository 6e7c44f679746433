"""A Kubernetes cluster for tests on one machine: a real control plane, and nodes and Services made of processes.

May import: the standard library, pytest and libraries of PyPI, never the product (`dualmap*`) but
for its list-watch loop (`dualmap_edge.kube`, in `api.follow`).
"""
