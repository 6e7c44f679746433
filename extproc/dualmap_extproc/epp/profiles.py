"""Reads the scheduling profiles of a picker's configuration: which there are, and that their plugins exist."""

from collections.abc import Collection, Mapping
from typing import Final

from dualmap.errors import PoolError
from dualmap_extproc.epp.fields import checked_mapping, list_at, text_at

_FIELD: Final = "schedulingProfiles"
_PROFILE_FIELDS: Final = ("name", "plugins")
_REFERENCE_FIELDS: Final = ("pluginRef", "weight")
# llm-d's name of the profile that chooses a pod for the images of a request.
_ENCODE: Final = "encode"
ENCODERS: Final = (
    "a configuration without encode-filter and its profile: a decode or prefill pod encodes images, and pods that only "
    "encode are not supported"
)
"""What is accepted instead of plugins and profiles for pods that only encode images."""


def read_profiles(fields: Mapping[str, object], plugins: Collection[str]) -> frozenset[str]:
    """Return the names of the profiles in a configuration's ``fields``; ``plugins`` are the names that they may use.

    Raises PoolError.
    """
    names: set[str] = set()
    for position, value in enumerate(list_at(fields, _FIELD, "", "a list of profiles")):
        place = f"{_FIELD}[{position}]"
        profile = checked_mapping(value, place, _PROFILE_FIELDS, "a field of a profile")
        name = text_at(profile, "name", place)
        if name == _ENCODE:
            raise PoolError(f"{place}.name", name, ENCODERS)
        if not name or name in names:
            raise PoolError(f"{place}.name", name or None, "a name that no other profile has")
        names.add(name)
        for number, reference in enumerate(list_at(profile, "plugins", f"{place}.", "a list of pluginRef and weight")):
            _check_reference(reference, f"{place}.plugins[{number}]", plugins)
    return frozenset(names)


def _check_reference(value: object, place: str, plugins: Collection[str]) -> None:
    reference = checked_mapping(value, place, _REFERENCE_FIELDS, "a field of a profile's plugin")
    name, weight = text_at(reference, "pluginRef", place), reference.get("weight")
    if name not in plugins:
        raise PoolError(f"{place}.pluginRef", name or None, "the name of a plugin in plugins")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise PoolError(f"{place}.weight", weight, "a number")
