"""Fits the engine model's parameters to the requests of a recording, and predicts their times with the fitted engine.

This package may import the core, numpy, and the engine model of ``dualmap_sim``. It reads no files.
"""
