"""What a container's process is told: its environment, and ``$(VAR)`` in its command line. Pure.

``containers.py`` asks for it before each start. The rules are Kubernetes' (core/v1 EnvVar, Container.command).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

Object = Mapping[str, Any]

_REFERENCE: Final = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED_FIELD: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ContainerConfigError(Exception):
    """A container asks for something that this kubelet cannot give; the message says for what and where."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace each ``$(VAR)`` of a known variable; an unknown one stays as it is, and ``$$`` becomes ``$``."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else variables.get(name, match[0])

    return _REFERENCE.sub(value, text)


def environment(
    pod: Object, container: Object, *, address: str, host_address: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of ``container`` over ``base``; each value may refer to those before it.

    ``address`` is the pod's, which its status need not show yet. Raises ContainerConfigError.
    """
    fields = {
        "status.podIP": address,
        "status.podIPs": address,
        "status.hostIP": host_address,
        "spec.nodeName": pod["spec"]["nodeName"],
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
    }
    if pod["spec"].get("initContainers"):
        raise ContainerConfigError(f"pod {pod['metadata']['name']}: init containers are not run here")
    if container.get("envFrom"):
        raise ContainerConfigError(f"container {container['name']}: envFrom is not known here, only env")
    own: dict[str, str] = {}
    for variable in container.get("env") or ():
        name = variable["name"]
        if "valueFrom" in variable:
            where = f"container {container['name']}: env {name}"
            own[name] = _field(variable["valueFrom"], fields, pod["metadata"], where)
        else:
            own[name] = expand(variable.get("value", ""), own)
    return {**base, **own}


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Return the program and its arguments; raises ContainerConfigError without ``command``, as images are unknown."""
    if not container.get("command"):
        raise ContainerConfigError(
            f"container {container['name']}: command is missing, and its image is not known here"
        )
    return [expand(part, variables) for part in (*container["command"], *(container.get("args") or ()))]


def _field(source: Object, fields: Mapping[str, str], metadata: Object, where: str) -> str:
    if "fieldRef" not in source:
        raise ContainerConfigError(f"{where}: valueFrom.{'/'.join(source)} is not known here, only fieldRef")
    path = source["fieldRef"]["fieldPath"]
    if path in fields:
        return fields[path]
    keyed = _KEYED_FIELD.fullmatch(path)
    if keyed is None:
        raise ContainerConfigError(f"{where}: fieldPath {path} is not known here, only {', '.join(sorted(fields))}")
    value: str = (metadata.get(keyed[1]) or {}).get(keyed[2], "")
    return value
