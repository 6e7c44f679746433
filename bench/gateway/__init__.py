"""What the router costs behind a real Envoy: beside that Envoy alone, and beside a picker that does nothing.

``command`` is the command line, ``stacks`` starts the processes, ``experiment`` measures them in turns, ``report``
turns the samples into tables. ``load``, ``upstream`` and ``trivial`` are processes of their own: the clients, the
engines, and the picker that answers a constant.
"""
