"""Fuzzes the router's untrusted inputs: ``make fuzz`` or, from the root, ``python -m fuzz --help``.

``targets`` defines the inputs and their invariants; each target is a pure function of bytes. ``engine`` drives one
target with atheris (coverage-guided), or with random mutations if atheris is not installed. ``__main__`` runs the
targets one after another, each in its own process. ``corpus`` contains inputs that together reach many branches.
``minimise`` keeps the corpus small, and the tests replay it.
"""
