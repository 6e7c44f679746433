"""``dualmap simulate`` and ``dualmap goodput``: policies compared in virtual time, on the router and engine that ship.

``simulate_command`` and ``goodput_command`` are the commands; ``options`` are those both have, ``engine_options`` the
engine's parameters among them, ``values`` what single options look like. ``plan`` turns them into experiments, ``runs``
does those in other processes, ``progress`` shows how far they are, ``tables`` and ``documents`` print what came out,
``charts`` draws it.
"""
