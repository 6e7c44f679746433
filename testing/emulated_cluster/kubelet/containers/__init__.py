"""The containers of a pod: start, probes, hooks and end, and the pod's status.

May import: `api`, `kubelet.pod_spec` and `kubelet.isolation`.
"""
