"""The seat of a picker of the Gateway API Inference Extension: its flags, its configuration file, its pool's members.

``app.epp`` is the command. This package may import the core, ``dualmap_edge``, ``pools`` and ``names``.
"""
