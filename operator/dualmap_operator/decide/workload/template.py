"""Reads a user's pod template, which may have any content.

The CRD accepts any value (``x-kubernetes-preserve-unknown-fields``). The API server refuses an invalid template when
the operator applies the StatefulSet; its error contains the field. Therefore, the functions in this module and in
``children``, ``termination`` and ``checks`` must accept any value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TEMPLATE_PATH: Final = "spec.workload.template"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContainer:
    """The container that serves requests: its index in ``containers`` and its content."""

    position: int
    written: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The container's field path in the pool, for errors and warnings."""
        return f"{TEMPLATE_PATH}.spec.containers[{self.position}]"


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def elements(value: object) -> Sequence[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def whole_number(value: object) -> int | None:
    """Return the value if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def copied(value: Any) -> Any:
    """Return a deep copy in plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [copied(inner) for inner in value]
    return value


def declared_ports(container: object) -> tuple[int, ...]:
    """Return the ``containerPort`` of every port that a container declares."""
    numbers = (whole_number(mapping(port).get("containerPort")) for port in elements(mapping(container).get("ports")))
    return tuple(number for number in numbers if number is not None)


def engine_container(template: Mapping[str, Any], port: int) -> EngineContainer | None:
    """Return the container that declares the engine's port, else the first container; None without containers."""
    containers = elements(mapping(template.get("spec")).get("containers"))
    position = next((place for place, each in enumerate(containers) if port in declared_ports(each)), 0)
    if position >= len(containers) or not isinstance(containers[position], Mapping):
        return None
    return EngineContainer(position=position, written=containers[position])
