"""``dualmap simulate`` and ``dualmap goodput``: compare policies in virtual time, with the production router code.

``simulate_command`` and ``goodput_command`` are the commands. ``options`` has their common options, ``engine_options``
the parameters of the engine model, and ``values`` the parsers of option values. ``plan`` turns the options into
experiments, and ``runs`` runs the experiments in other processes. ``progress`` shows a progress bar, ``tables`` and
``documents`` print the results, and ``charts`` draws them.
"""
