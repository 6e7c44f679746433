"""The InferencePool as frozen values: its fields, its members, and which pool may claim a model's name.

May import nothing of the core but errors.
"""
