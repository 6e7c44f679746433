"""Reads recordings from files, computes their figures, merges them, and converts them from and to other formats.

``reader`` yields a recording's values in order of time. The format of a line is in ``dualmap.recordings``. This package
reads and writes files, and may import the core and ``dualmap_sim.workloads``.
"""
