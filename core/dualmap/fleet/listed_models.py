"""Which members list a model's name or a LoRA adapter, as their engines' lists of models say."""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

# The members of at most this many names are stored: in a pool for any name, clients choose the names.
_NAMES_MAX: Final = 4096


class ModelMembers(NamedTuple):
    """The members of a pool for one name. Members whose list of models is not known are in ``absent`` only.

    ``loaded`` are the members that list the name, and ``absent`` are all others. ``lacking`` are the members with a
    list that does not contain the name.
    """

    loaded: frozenset[str]
    absent: frozenset[str]
    lacking: frozenset[str]

    def state(self, member: str) -> str:
        """Return what is known of a member, as the receipt says it."""
        if member in self.loaded:
            return "loaded"
        return "absent" if member in self.lacking else "unknown"


class ListedModels:
    """The models that each member of a pool lists."""

    def __init__(self, members: Iterable[str]) -> None:
        self._members = frozenset(members)
        self._models: dict[str, frozenset[str]] = {}
        self._of: dict[str, ModelMembers] = {}

    def of(self, name: str) -> ModelMembers:
        """Return the members for a name of the pool's model, or an adapter, that the pool serves."""
        found = self._of.get(name)
        if found is None:
            loaded = frozenset(member for member, models in self._models.items() if name in models)
            found = ModelMembers(loaded, self._members - loaded, frozenset(self._models) - loaded)
            if len(self._of) >= _NAMES_MAX:
                self._of.clear()
            self._of[name] = found
        return found

    def put(self, member: str, models: Collection[str]) -> None:
        """Set the models that a member lists; empty if its list is not known."""
        if models:
            self._models[member] = frozenset(models)
        else:
            self._models.pop(member, None)
        self._of.clear()

    def adopt(self, members: Iterable[str], known: Collection[str]) -> None:
        """Set the members of the pool; only those in ``known`` keep their models."""
        self._members = frozenset(members)
        self._models = {member: models for member, models in self._models.items() if member in known}
        self._of.clear()
