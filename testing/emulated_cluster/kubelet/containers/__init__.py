"""The containers of a pod: start, probes, hooks, end, and the status that they give the pod.

May import: `api`, `kubelet.pod_spec` and `kubelet.isolation`.
"""
