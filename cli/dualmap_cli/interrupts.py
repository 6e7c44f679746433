"""The message and the exit status of an interrupted command, for ``main`` and the demo."""

from typing import Final

INTERRUPTED: Final = "interrupted; nothing is left running."
SIGNAL_EXIT_BASE: Final = 128
"""Shells return this number plus the signal's number for a command that a signal ended: 130 for Ctrl-C."""
