"""Reads large request bodies in processes beside the event loop.

``processes`` starts the processes and passes bodies to them; ``worker`` is the program of such a process. It may import
``request`` and the rooms below it, and no server library.
"""
