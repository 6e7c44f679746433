"""Reads what other pickers of the Gateway API Inference Extension read: flags, a configuration file, one pool's pods.

``app.epp`` is the command. This package may import the core, ``dualmap_edge``, ``pools`` and ``names``.
"""
