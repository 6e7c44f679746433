"""The operator: reconciles InferencePools, that is, their children, the members of their hash rings and their status.

Layers, each of which may import those below it only: main, wiring, run, act, observe, api, decide (pure), then names,
settings and errors. docs/architecture.md walks through one reconcile.
"""
