"""The files of a volume from Kubernetes objects: ConfigMaps, Secrets, pod fields, service account tokens. Pure.

``volumes.py`` fetches the objects and writes the files. Each volume becomes a list of sources, as in a projected volume
(core/v1 ProjectedVolumeSource).
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError, Field, field_value

Object = Mapping[str, Any]
# Kind and name of a ConfigMap or Secret in the pod's namespace.
Reference = tuple[str, str]

COLLECTIONS: Final = {"configMap": "configmaps", "secret": "secrets"}
_DEFAULT_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a volume. ``token`` means that the file's content is a service account's token."""

    content: bytes
    mode: int
    token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A volume from Kubernetes objects: its sources, as in a projected volume, and the mode of its files."""

    name: str
    sources: Sequence[Object]
    mode: int

    @property
    def references(self) -> frozenset[Reference]:
        """The ConfigMaps and Secrets among the volume's sources."""
        return frozenset(
            (kind, source[kind]["name"]) for source in self.sources for kind in COLLECTIONS if kind in source
        )

    @property
    def token(self) -> Object | None:
        """The volume's ``serviceAccountToken`` source, or None."""
        return next((each["serviceAccountToken"] for each in self.sources if "serviceAccountToken" in each), None)

    def files(self, objects: Mapping[Reference, Object | None], fields: Field, token: str) -> dict[str, File]:
        """Return the files by path; raises ContainerConfigError for a missing object or key."""
        files: dict[str, File] = {}
        for source in self.sources:
            for kind in COLLECTIONS:
                if kind in source:
                    files |= self._keys(kind, source[kind], objects[kind, source[kind]["name"]])
            for item in source.get("downwardAPI", {}).get("items") or ():
                if "fieldRef" not in item:
                    raise ContainerConfigError(f"volume {self.name}: {item['path']}: only fieldRef is supported")
                value = field_value(item["fieldRef"]["fieldPath"], fields, f"volume {self.name}")
                files[item["path"]] = File(content=value.encode(), mode=item.get("mode", self.mode))
            if "serviceAccountToken" in source:
                path = source["serviceAccountToken"]["path"]
                files[path] = File(content=token.encode(), mode=self.mode, token=True)
        return files

    def _keys(self, kind: str, source: Object, found: Object | None) -> dict[str, File]:
        optional = source.get("optional", False)
        if found is None:
            if optional:
                return {}
            raise ContainerConfigError(f'volume {self.name}: {kind} "{source["name"]}" not found')
        values = contents(kind, found)
        if not source.get("items"):
            return {key: File(content=value, mode=self.mode) for key, value in values.items()}
        files = {}
        for item in source["items"]:
            if item["key"] in values:
                files[item["path"]] = File(content=values[item["key"]], mode=item.get("mode", self.mode))
            elif not optional:
                raise ContainerConfigError(f'volume {self.name}: {kind} "{source["name"]}" has no key {item["key"]}')
        return files


def read_payload(volume: Object) -> Payload | None:
    """Return the payload of a pod's volume; None for a volume that has no objects as sources."""
    name = volume["name"]
    if "projected" in volume:
        projected = volume["projected"]
        return Payload(name=name, sources=projected["sources"], mode=projected.get("defaultMode", _DEFAULT_MODE))
    for kind in ("configMap", "secret", "downwardAPI"):
        if kind in volume:
            source = volume[kind]
            named = {**source, "name": source["secretName"]} if kind == "secret" else source
            return Payload(name=name, sources=[{kind: named}], mode=source.get("defaultMode", _DEFAULT_MODE))
    return None


def contents(kind: str, found: Object) -> dict[str, bytes]:
    """Return the values of a ConfigMap or Secret by their keys."""
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
