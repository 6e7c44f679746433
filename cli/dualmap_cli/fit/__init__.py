"""``dualmap fit``: fits the engine model to a recording. ``dualmap_sim.fitting`` computes the fit.

This package has the option parsing and the output as text, JSON and charts. It may import ``dualmap_cli.trace``,
``dualmap_cli.engine_file``, ``dualmap_cli.running`` and everything below the command line.
"""
