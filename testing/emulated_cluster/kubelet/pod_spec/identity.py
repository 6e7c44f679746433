"""The user of a container, and the owners of the files in its pod's volumes (core/v1 SecurityContext).

``runtimes.py`` starts processes as the container's user; ``volumes.py`` sets the owners of files.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError
from emulated_cluster.kubelet.pod_spec.payloads import File

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """User and group ids, with the home folder from the image's /etc/passwd."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of a pod's volumes: ``group`` is its fsGroup, ``user`` the common user of all its containers."""

    user: int | None
    group: int | None

    @classmethod
    def of(cls, pod: Object) -> Self:
        """Return the owner for a pod."""
        spec = pod["spec"]
        containers = (*(spec.get("initContainers") or ()), *spec["containers"])
        users = {_of_container(spec, each, "runAsUser") for each in containers}
        return cls(
            user=users.pop() if len(users) == 1 else None, group=(spec.get("securityContext") or {}).get("fsGroup")
        )

    def own_writable_folder(self, path: Path) -> None:
        """Make a folder writable for all users; new files in the folder belong to the pod's group."""
        path.chmod(0o777)
        if self.group is not None:
            os.chown(path, -1, self.group)
            path.chmod(0o2777)

    def own_tree(self, path: Path) -> None:
        """Let the pod's group read and write everything in a folder, as a kubelet does for a persistent volume.

        Without a group, nothing changes. Links are not followed. Files may vanish, because other pods use the volume.
        """
        if self.group is None:
            return
        for folder, _, names in os.walk(path):
            for each in (Path(folder), *(Path(folder, name) for name in names)):
                with contextlib.suppress(FileNotFoundError):
                    os.chown(each, -1, self.group, follow_symlinks=False)
                    mode = each.lstat().st_mode
                    if stat.S_ISLNK(mode):
                        continue
                    added = 0o2770 if stat.S_ISDIR(mode) else 0o660
                    each.chmod(stat.S_IMODE(mode) | added)

    def own_file(self, path: Path, file: File) -> None:
        """Set a file's mode and owner.

        The pod's group may read every file. Without a group, only the pod's user may read a token.
        """
        mode = file.mode
        if file.token and (self.user is not None or self.group is not None):
            mode = 0o600
            os.chown(path, -1 if self.user is None else self.user, -1)
        if self.group is not None:
            mode |= 0o440
            os.chown(path, -1, self.group)
        path.chmod(mode)


def identity(pod: Object, container: Object, *, root: Path, image_user: str) -> Identity:
    """Return the user of a container. ``image_user`` is the image's USER: ``uid[:gid]`` or a name in its passwd.

    Raises ContainerConfigError for a user that the image does not have, and for root with ``runAsNonRoot``.
    """
    spec = pod["spec"]
    wanted = _of_container(spec, container, "runAsUser")
    name, _, image_group = image_user.partition(":")
    known = _passwd(root)
    entry = next((each for each in known if name in {each[0], each[2]}), None)
    if wanted is not None:
        uid, entry = wanted, next((each for each in known if each[2] == str(wanted)), None)
    elif entry is not None:
        uid = int(entry[2])
    elif name.isdecimal():
        uid = int(name)
    else:
        raise ContainerConfigError(f"container {container['name']}: the image has no user {name}")
    if uid == 0 and _of_container(spec, container, "runAsNonRoot"):
        raise ContainerConfigError(f"container {container['name']} has runAsNonRoot and would run as root")
    gid = _of_container(spec, container, "runAsGroup")
    if gid is None:
        own = int(entry[3]) if entry is not None else 0
        gid = int(image_group) if wanted is None and image_group.isdecimal() else own
    context = spec.get("securityContext") or {}
    groups = {gid, *(context.get("supplementalGroups") or ())}
    if "fsGroup" in context:
        groups.add(context["fsGroup"])
    return Identity(uid=uid, gid=gid, groups=tuple(sorted(groups)), home=entry[5] if entry is not None else "/")


def _of_container(spec: Object, container: Object, key: str) -> Any:
    own = container.get("securityContext") or {}
    return own[key] if key in own else (spec.get("securityContext") or {}).get(key)


def _passwd(root: Path) -> list[list[str]]:
    try:
        lines = (root / "etc" / "passwd").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [fields for fields in (line.split(":") for line in lines) if len(fields) == 7]
