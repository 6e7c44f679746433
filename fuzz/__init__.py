"""Fuzzing of what strangers can send the router: ``make fuzz`` or, from the root, ``python -m fuzz --help``.

``targets`` says what is fuzzed and what must hold, each target a pure function of bytes; ``engine`` drives one of them
by atheris (coverage-guided) or, where that is not installed, by random mutations; ``__main__`` runs them one after the
other, each in a process of its own. ``corpus`` holds inputs that between them reach what can be reached, kept small
by ``minimise``; the tests replay them.
"""
