"""InferencePool objects as the Kubernetes API shows them, to the pools that are served: pure, asked by ``pools.kube``.

An object that the reader refuses keeps its last good version, as a pool file does. Names are first come, first served:
a model that two pools claim stays with the older object (``dualmap.pools.claims``), and the younger one serves what
is left to it, so that its members are still drained in good order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmap.errors import PoolError
from dualmap.objects.pods import mapping_in, text_in
from dualmap.objects.pool_reader import read_pools
from dualmap.pools.claims import Claimant, lost_claims, seniority
from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is not served of a pool as its object has it; ``field``, ``value`` and ``accepted`` as in PoolError."""

    pool: str
    field: str
    value: str
    accepted: str


@dataclass(slots=True, kw_only=True)
class _Known:
    """One object: which it is, how old, its last good version and what its newest was refused for."""

    uid: str
    created: str
    selector: str
    pool: Pool | None
    refusal: Refusal | None


class PoolObjects:
    """The objects of the scope a router watches, by ``namespace/name``."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def put(self, body: Mapping[str, Any]) -> None:
        """Take an object that is new or has changed; whatever it holds, this returns."""
        metadata = mapping_in(body, "metadata")
        key, uid = _key(body), text_in(metadata, "uid")
        before = self._known.get(key)
        # One that was deleted and made anew has nothing in common with the last but the name.
        good = before.pool if before is not None and before.uid == uid else None
        refusal = None
        try:
            (good,) = read_pools(body)
        except PoolError as error:
            refusal = Refusal(pool=key, field=error.field, value=_shown(error.value), accepted=error.accepted)
        self._known[key] = _Known(
            uid=uid,
            created=text_in(metadata, "creationTimestamp"),
            selector=text_in(mapping_in(body, "status"), "selector"),
            pool=good,
            refusal=refusal,
        )

    def remove(self, body: Mapping[str, Any]) -> None:
        """Forget an object that was deleted."""
        self._known.pop(_key(body), None)

    def replace(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Take these objects for all there are."""
        bodies = tuple(bodies)
        for key in self._known.keys() - {_key(body) for body in bodies}:
            del self._known[key]
        for body in bodies:
            self.put(body)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """What is served: the oldest first, which is who keeps a name that two claim (``Picker.set_pools``)."""
        aged = sorted(self._known.items(), key=lambda item: seniority(item[1].created, item[0]))
        return tuple(known.pool for _, known in aged if known.pool is not None)

    @property
    def selectors(self) -> dict[str, str]:
        """The label selector of each served pool's pods, of those that have one, by ``namespace/name``."""
        return {key: known.selector for key, known in self._known.items() if known.pool is not None and known.selector}

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What is refused now: objects as a whole, and claims to a name that an older pool has."""
        refused = [known.refusal for known in self._known.values() if known.refusal is not None]
        claimants = (Claimant.of(known.pool, known.created) for known in self._known.values() if known.pool is not None)
        for lost in lost_claims(claimants):
            accepted = f"a model name, alias or adapter that the older pool {lost.owner} does not have"
            refused.append(Refusal(pool=lost.pool, field="spec.model", value=_shown(lost.name), accepted=accepted))
        return tuple(refused)


def _key(body: Mapping[str, Any]) -> str:
    metadata = mapping_in(body, "metadata")
    return f"{text_in(metadata, 'namespace')}/{text_in(metadata, 'name')}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
