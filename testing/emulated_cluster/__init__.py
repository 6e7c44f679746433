"""A Kubernetes cluster for tests on one machine: a real control plane, with processes that emulate nodes and Services.

May import: the standard library, pytest and libraries of PyPI. Of the product, only `api.follow` may import a module:
the list-watch loop `dualmap_edge.kube`.
"""
