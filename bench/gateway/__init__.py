"""Measures the cost of the router behind a real Envoy, compared with Envoy alone and with a trivial picker.

``command`` is the command line, ``stacks`` starts the processes, and ``experiment`` measures the stacks in turn.
``report`` makes tables of the samples. Three modules run as separate processes: ``load`` (the clients), ``upstream``
(the engines), and ``trivial`` (the picker with a constant answer).
"""
