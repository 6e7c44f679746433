"""``dualmap explain``: the decision for a request, of a new router or of a recording.

``dualmap_extproc.app.explain`` makes the decision of a new router. This package may import ``dualmap_cli.trace``,
``dualmap_cli.running`` and everything below the command line.
"""
