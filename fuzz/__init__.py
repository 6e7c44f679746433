"""Fuzzes the router's untrusted inputs: ``make fuzz`` or, from the root, ``python -m fuzz --help``.

``targets`` defines the inputs and their invariants; each target is a pure function of bytes. ``engine`` drives one
target with atheris (coverage-guided) or, where that is not installed, with random mutations. ``__main__`` runs the
targets one after the other, each in its own process. ``corpus`` holds inputs that together reach many branches;
``minimise`` keeps it small, and the tests replay it.
"""
