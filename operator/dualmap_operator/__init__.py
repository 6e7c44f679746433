"""The operator: reconciles each InferencePool's children, the members of its hash ring and its status.

The layers are, from top to bottom: main, wiring, run, act, observe, api, decide (pure), then names, settings and
errors. A layer imports lower layers only. docs/architecture.md describes one reconcile, step by step.
"""
