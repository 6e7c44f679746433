"""What messages call a command and its options, where commands differ."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The command's ``name``, and the option for the port without TLS."""

    name: str
    health_port: str


ROUTER: Final = Program(name="dualmap router", health_port="--health-port")
EPP: Final = Program(name="dualmap epp", health_port="--grpc-health-port")
