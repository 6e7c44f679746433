"""Fixtures of the router's tests."""

from extproc import transports

transport = transports.transport
