"""Reads large request bodies in processes beside the event loop.

``processes`` starts the processes and passes bodies to them; ``worker`` is the program of such a process. This package
may import ``tokens.rendering``, ``request`` and the packages below it, and no server library.
"""
