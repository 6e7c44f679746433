"""Measures the router's cost behind a real Envoy, beside Envoy alone and beside a trivial picker.

``command`` is the command line, ``stacks`` starts the processes, ``experiment`` measures them in turns, and ``report``
makes tables of the samples. ``load``, ``upstream`` and ``trivial`` run as separate processes: the clients, the engines,
and the picker whose answer is constant.
"""
