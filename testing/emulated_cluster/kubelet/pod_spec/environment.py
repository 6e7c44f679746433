"""The environment of a container's process, and the expansion of ``$(VAR)`` in its command line. Pure.

``runtimes.py`` computes the environment before each start. The rules are those of Kubernetes (core/v1 EnvVar,
Container.command).
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

Object = Mapping[str, Any]
# The values of a ConfigMap or Secret by key; None for a missing object.
Values = Mapping[str, bytes] | None

_REFERENCE: Final = re.compile(r"\$\$|\$\(([^)]*)\)")
_KEYED_FIELD: Final = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_KEY_SOURCES: Final = {"configMapKeyRef": "configMap", "secretKeyRef": "secret"}
_QUANTITY: Final = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_SUFFIXES: Final = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGT", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGT", 1)},
}
_WHOLE_SOURCES: Final = {"configMapRef": "configMap", "secretRef": "secret"}


class ContainerConfigError(Exception):
    """The emulated kubelet cannot run a container of this spec. The message has the cause and its path in the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The fields of a pod for fieldRef.

    ``address`` is the pod's IP address, which the pod's status may not have yet.
    """

    pod: Object
    address: str
    host_address: str


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace each ``$(VAR)`` of a known variable.

    References to unknown variables stay unchanged, and ``$$`` becomes ``$``.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else variables.get(name, match[0])

    return _REFERENCE.sub(value, text)


def references(container: Object) -> frozenset[tuple[str, str]]:
    """Return kind and name of the ConfigMaps and Secrets that the container's variables refer to."""
    single = [
        (kind, variable["valueFrom"][source]["name"])
        for variable in container.get("env") or ()
        for source, kind in _KEY_SOURCES.items()
        if source in variable.get("valueFrom", {})
    ]
    whole = [
        (kind, each[source]["name"])
        for each in container.get("envFrom") or ()
        for source, kind in _WHOLE_SOURCES.items()
        if source in each
    ]
    return frozenset((*single, *whole))


def environment(
    container: Object, fields: Field, *, base: Mapping[str, str], objects: Callable[[str, str], Values]
) -> dict[str, str]:
    """Return ``base`` with the variables of ``container`` added. Each value may refer to earlier variables.

    ``objects`` returns the values of a ConfigMap or Secret by kind and name. Raises ContainerConfigError.
    """
    own = _from_whole_objects(container, objects)
    for variable in container.get("env") or ():
        name = variable["name"]
        if "valueFrom" not in variable:
            own[name] = expand(variable.get("value", ""), own)
            continue
        where = f"container {container['name']}: env {name}"
        source = variable["valueFrom"]
        if "resourceFieldRef" in source:
            value: str | None = _resource(source["resourceFieldRef"], container, where)
        else:
            value = _value_from(source, fields, objects, where)
        if value is not None:
            own[name] = value
    return {**base, **own}


def service_links(services: Iterable[Object]) -> dict[str, str]:
    """Return the variables that describe the Services of the pod's namespace (core/v1 PodSpec enableServiceLinks)."""
    told = {}
    for service in services:
        host = service["spec"].get("clusterIP") or "None"
        ports = service["spec"].get("ports") or ()
        if host == "None" or not ports:
            continue
        name = _variable(service["metadata"]["name"])
        told[f"{name}_SERVICE_HOST"] = host
        told[f"{name}_SERVICE_PORT"] = str(ports[0]["port"])
        for number, each in enumerate(ports):
            protocol, port = each.get("protocol", "TCP"), str(each["port"])
            url = f"{protocol.lower()}://{host}:{port}"
            if each.get("name"):
                told[f"{name}_SERVICE_PORT_{_variable(each['name'])}"] = port
            if number == 0:
                told[f"{name}_PORT"] = url
            prefix = f"{name}_PORT_{port}_{protocol}"
            told |= {prefix: url, f"{prefix}_PROTO": protocol.lower(), f"{prefix}_PORT": port, f"{prefix}_ADDR": host}
    return told


def command_line(container: Object, variables: Mapping[str, str], *, entrypoint: Sequence[str] = ()) -> list[str]:
    """Return the program and its arguments.

    ``entrypoint`` is the image's entry point, for a container without ``command``.

    Raises ContainerConfigError if both are missing.
    """
    command = container.get("command") or entrypoint
    if not command:
        raise ContainerConfigError(
            f"container {container['name']}: command is missing, and the emulated kubelet has no root file "
            "system for the image"
        )
    return [expand(part, variables) for part in (*command, *(container.get("args") or ()))]


def field_value(path: str, fields: Field, where: str) -> str:
    """Return the pod's field at a fieldRef's path; raises ContainerConfigError for an unsupported field."""
    metadata, spec = fields.pod["metadata"], fields.pod["spec"]
    known = {
        "status.podIP": fields.address,
        "status.podIPs": fields.address,
        "status.hostIP": fields.host_address,
        "spec.nodeName": spec["nodeName"],
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
    }
    if path in known:
        return str(known[path])
    if path in {"metadata.labels", "metadata.annotations"}:
        values = metadata.get(path.partition(".")[2]) or {}
        return "".join(f'{key}="{value}"\n' for key, value in sorted(values.items()))
    keyed = _KEYED_FIELD.fullmatch(path)
    if keyed is None:
        raise ContainerConfigError(
            f"{where}: fieldPath {path} is not supported; supported paths: {', '.join(sorted(known))}"
        )
    return str((metadata.get(keyed[1]) or {}).get(keyed[2], ""))


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


def _from_whole_objects(container: Object, objects: Callable[[str, str], Values]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for each in container.get("envFrom") or ():
        source, kind = next((source, kind) for source, kind in _WHOLE_SOURCES.items() if source in each)
        values = objects(kind, each[source]["name"])
        if values is None and not each[source].get("optional", False):
            raise ContainerConfigError(
                f'container {container["name"]}: envFrom: {kind} "{each[source]["name"]}" not found'
            )
        prefix = each.get("prefix", "")
        variables |= {prefix + key: value.decode() for key, value in (values or {}).items()}
    return variables


def _resource(source: Object, container: Object, where: str) -> str:
    """Return a limit or request of the same container in units of the divisor, rounded up."""
    kind, _, name = source["resource"].partition(".")
    quantity = ((container.get("resources") or {}).get(kind) or {}).get(name)
    if quantity is None:
        raise ContainerConfigError(f"{where}: resourceFieldRef {source['resource']}: the container does not set it")
    divisor = source.get("divisor") or "1"
    return str(math.ceil(_quantity(quantity) / (_quantity(divisor) or 1)))


def _quantity(text: str) -> Fraction:
    """Return the value of a Kubernetes quantity with a decimal or binary suffix."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None or found[2] not in _SUFFIXES:
        raise ContainerConfigError(f"quantity {text} is not supported")
    return Fraction(found[1]) * _SUFFIXES[found[2]]


def _value_from(source: Object, fields: Field, objects: Callable[[str, str], Values], where: str) -> str | None:
    """Return the value, or None for a missing optional value."""
    if "fieldRef" in source:
        return field_value(source["fieldRef"]["fieldPath"], fields, where)
    for name, kind in _KEY_SOURCES.items():
        if name not in source:
            continue
        wanted = source[name]
        value = (objects(kind, wanted["name"]) or {}).get(wanted["key"])
        if value is None and not wanted.get("optional", False):
            raise ContainerConfigError(
                f'{where}: {kind} "{wanted["name"]}" does not exist, or has no key {wanted["key"]}'
            )
        return None if value is None else value.decode()
    raise ContainerConfigError(f"{where}: valueFrom.{'/'.join(source)} is not supported")
