"""The InferencePool as frozen values: its fields, its members, and the claims of pools to model names.

This package may import only errors from the core.
"""
