"""The names of a command and of its options in messages, where commands differ."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The command's ``name``, and its options for the port without TLS and for the certificate."""

    name: str
    health_port: str
    tls: str


ROUTER: Final = Program(name="dualmap router", health_port="--health-port", tls="--tls")
EPP: Final = Program(name="dualmap epp", health_port="--grpc-health-port", tls="--cert-path")
