"""The control plane: keeps an InferencePool's children, its hash rings' members and its status as the spec wants them.

Gather (``gather``) -> decide (``plan``, pure) -> apply (``apply``); docs/architecture.md has the walk of a pass.
"""
