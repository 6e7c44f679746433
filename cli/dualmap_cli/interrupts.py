"""What every command says and returns when it is interrupted: shared by ``main`` and the demo."""

from typing import Final

INTERRUPTED: Final = "interrupted; nothing is left running."
SIGNAL_EXIT_BASE: Final = 128
"""Shells' convention: a command that a signal ended returns this plus the signal's number, 130 for Ctrl-C."""
