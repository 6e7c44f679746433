"""A Kubernetes cluster for tests on one machine: a real control plane, and nodes and Services made of processes.

May import: the standard library, pytest and libraries of PyPI. The only product code it may import is the list-watch
loop (`dualmap_edge.kube`, in `api.follow`).
"""
