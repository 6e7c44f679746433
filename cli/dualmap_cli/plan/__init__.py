"""``dualmap plan``: the least number of instances for recorded traffic. ``dualmap_sim.planning`` computes it.

This package has the options and the output as text, JSON and charts. It may import ``dualmap_cli.simulate``,
``dualmap_cli.engine_file``, ``dualmap_cli.running`` and everything below the command line.
"""
