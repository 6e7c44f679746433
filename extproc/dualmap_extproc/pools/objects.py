"""Converts InferencePool objects of the Kubernetes API to the pools to serve, without I/O, for ``pools.kube``.

For an invalid object, the router keeps the last valid version, as for a pool file. If two pools have the same model,
the older pool serves it (``dualmap.pools.claims``). The younger pool still serves its other models, so that its members
drain in order. The same applies to a model name that is reserved for another namespace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dualmap.errors import PoolError
from dualmap.objects.pods import mapping_in, text_in
from dualmap.objects.pool_reader import check_addresses, read_pools
from dualmap.pools.claims import Claimant, foreign_names, lost_claims, prefill_problem, seniority
from dualmap.pools.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidPool:
    """The fault of a pool's object. ``field``, ``value`` and ``accepted`` are those of PoolError."""

    pool: str
    field: str
    value: str
    accepted: str


@dataclass(slots=True, kw_only=True)
class _Known:
    """One object: its identity, creation time and last valid version, and the error of its newest version."""

    uid: str
    created: str
    selector: str
    pool: Pool | None
    invalid: InvalidPool | None


class PoolObjects:
    """The objects that a router watches, by ``namespace/name``."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._reserved: Mapping[str, str] = {}
        # The names that are reserved for other namespaces, by namespace.
        self._foreign: dict[str, frozenset[str]] = {}

    def put(self, body: Mapping[str, Any]) -> None:
        """Add or replace an object. The method does not raise an error for an invalid object."""
        metadata = mapping_in(body, "metadata")
        key, uid = _key(body), text_in(metadata, "uid")
        before = self._known.get(key)
        # A recreated object has the name of the deleted object but must not keep its last valid version.
        good = before.pool if before is not None and before.uid == uid else None
        invalid = None
        try:
            (pool,) = read_pools(body)
            check_addresses(pool)
            good = pool
        except PoolError as error:
            invalid = InvalidPool(pool=key, field=error.field, value=error.shown, accepted=error.accepted)
        self._known[key] = _Known(
            uid=uid,
            created=text_in(metadata, "creationTimestamp"),
            selector=text_in(mapping_in(body, "status"), "selector"),
            pool=good,
            invalid=invalid,
        )

    def remove(self, body: Mapping[str, Any]) -> None:
        """Remove an object that was deleted."""
        self._known.pop(_key(body), None)

    def replace(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Replace all objects with ``bodies``."""
        bodies = tuple(bodies)
        for key in self._known.keys() - {_key(body) for body in bodies}:
            del self._known[key]
        for body in bodies:
            self.put(body)

    def reserve(self, reserved: Mapping[str, str]) -> None:
        """Replace the reservations: the namespace of each reserved model name."""
        self._reserved = reserved
        self._foreign = {}

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools to serve, oldest first: if two pools have the same model, the first pool serves it.

        A pool's engines may serve adapters that its object does not name, so all reserved names are checked.
        """
        aged = sorted(self._known.items(), key=lambda item: seniority(item[1].created, item[0]))
        return tuple(
            replace(known.pool, foreign_names=self._foreign_to(known.pool))
            for _, known in aged
            if known.pool is not None
        )

    @property
    def selectors(self) -> dict[str, str]:
        """The label selectors of pods by their pool's ``namespace/name``, without pools that have no selector."""
        return {key: known.selector for key, known in self._known.items() if known.pool is not None and known.selector}

    @property
    def invalid(self) -> tuple[InvalidPool, ...]:
        """The current faults: invalid objects, and model names of older pools or of other namespaces."""
        invalid = [known.invalid for known in self._known.values() if known.invalid is not None]
        pools = {key: known.pool for key, known in self._known.items() if known.pool is not None}
        claimants = {key: Claimant.of(pool, self._known[key].created) for key, pool in pools.items()}
        for key, claimant in claimants.items():
            problem = prefill_problem(claimant, claimants)
            if problem:
                accepted = f"another pool of the same namespace, with the same model ({problem})"
                value = _shown(pools[key].prefill_pool)
                invalid.append(InvalidPool(pool=key, field="spec.prefillPool", value=value, accepted=accepted))
        for lost in lost_claims(claimants.values(), self._reserved):
            accepted = (
                f"a model name, alias or adapter that is not reserved for the namespace {lost.owner}"
                if lost.reserved
                else f"a model name, alias or adapter that the older pool {lost.owner} does not have"
            )
            invalid.append(InvalidPool(pool=lost.pool, field="spec.model", value=_shown(lost.name), accepted=accepted))
        return tuple(invalid)

    def _foreign_to(self, pool: Pool) -> frozenset[str]:
        names = self._foreign.get(pool.namespace)
        if names is None:
            names = frozenset(foreign_names(pool.id, self._reserved, self._reserved))
            self._foreign[pool.namespace] = names
        return names


def _key(body: Mapping[str, Any]) -> str:
    metadata = mapping_in(body, "metadata")
    return f"{text_in(metadata, 'namespace')}/{text_in(metadata, 'name')}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
