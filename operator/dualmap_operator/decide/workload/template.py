"""Reading the pod template a user wrote, whatever stands in it.

The schema lets any value through (``x-kubernetes-preserve-unknown-fields``); what Kubernetes does not accept is refused
by the API server when the StatefulSet is applied, with the path. Until then nothing here, nor in ``children``,
``stopping`` and ``checks`` which build on it, may fail over it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TEMPLATE_PATH: Final = "spec.workload.template"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContainer:
    """The container that serves requests: its place among the containers, and what the user wrote there."""

    position: int
    written: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Where it stands in the pool, as refusals and warnings name it."""
        return f"{TEMPLATE_PATH}.spec.containers[{self.position}]"


def mapping(value: object) -> Mapping[str, Any]:
    """Return the object that stands somewhere, an empty one where something else does."""
    return value if isinstance(value, Mapping) else {}


def elements(value: object) -> Sequence[Any]:
    """Return the list that stands somewhere, an empty one where something else does."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def whole_number(value: object) -> int | None:
    """Return the integer that stands somewhere, None where something else does."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def copied(value: Any) -> Any:
    """Return a copy that shares nothing with what the user's object holds, in plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [copied(inner) for inner in value]
    return value


def declared_ports(container: object) -> tuple[int, ...]:
    """Return the ``containerPort`` of every port a container declares."""
    numbers = (whole_number(mapping(port).get("containerPort")) for port in elements(mapping(container).get("ports")))
    return tuple(number for number in numbers if number is not None)


def engine_container(template: Mapping[str, Any], port: int) -> EngineContainer | None:
    """Return the container that declares the engine's port, else the first; None where that is no container at all."""
    containers = elements(mapping(template.get("spec")).get("containers"))
    position = next((place for place, each in enumerate(containers) if port in declared_ports(each)), 0)
    if position >= len(containers) or not isinstance(containers[position], Mapping):
        return None
    return EngineContainer(position=position, written=containers[position])
