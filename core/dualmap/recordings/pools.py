"""A pool as the fields of a line: the settings that decide about requests, by the names of ``dualmap.pools.pool``.

The fields are those of the immutable values, so a setting that is new there is in the format, too. A field that a line
lacks has its default. The line omits settings that do not affect decisions or may contain a secret: the addresses of
stores, tokenizers and KV events, and the names of objectives.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from math import inf
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from dualmap.policies.registry import POLICIES
from dualmap.pools.kv_store import KvStore
from dualmap.pools.pool import Engine, Pool, Routing
from dualmap.recordings.errors import InvalidField
from dualmap.recordings.fields import Fields

LEFT_OUT: Final[Mapping[type, frozenset[str]]] = {
    Pool: frozenset({"objectives", "foreign_names"}),
    Engine: frozenset({"port", "kv_events", "tokenizer", "discovery"}),
    Routing: frozenset({"receipt_header", "receipt_fields", "max_body_bytes", "shadow", "shadow_sample"}),
    KvStore: frozenset({"endpoint", "hash", "seed", "key", "timeout_s"}),
}
"""The fields that no line has, by the class of the value."""
# No setting is a larger number than this.
_LARGEST: Final = 1e15

_ValueT = TypeVar("_ValueT")


def pool_fields(pool: Pool) -> dict[str, object]:
    """Return a pool as JSON values without the fields that recordings leave out. An infinite number becomes null."""
    encoded: dict[str, object] = _encoded(pool)
    return encoded


def read_pool(raw: Fields) -> Pool:
    """Return the pool that the fields describe. Raises InvalidField, also for an unknown policy and an equal member."""
    pool = _decoded(Pool, raw)
    if pool.routing.policy not in POLICIES:
        raise InvalidField(raw.at("routing.policy"), pool.routing.policy, f"one of {', '.join(POLICIES)}")
    for names in ([member.id for member in pool.members], [member.endpoint for member in pool.members]):
        for name, count in Counter(names).items():
            if count > 1:
                raise InvalidField(raw.at("members"), [name] * count, "each id and each address once")
    return pool


def _fields_of(kind: type[Any]) -> tuple[tuple[Field[Any], Any], ...]:
    """Return the fields of a class that lines have, and their types."""
    hints, left_out = get_type_hints(kind), LEFT_OUT.get(kind, frozenset())
    return tuple((each, hints[each.name]) for each in fields(kind) if each.init and each.name not in left_out)


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _encoded(getattr(value, each.name)) for each, _ in _fields_of(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    return None if value == inf else value


def _decoded(kind: type[_ValueT], raw: Fields) -> _ValueT:
    known = {}
    for each, hint in _fields_of(kind):
        if each.name in raw.raw:
            known[each.name] = _read(hint, raw, each.name)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise InvalidField(raw.at(each.name), None, "a value here")
    return kind(**known)


def _read(hint: Any, raw: Fields, name: str) -> Any:
    """Return a field's value of the type ``hint``. Raises InvalidField."""
    value = raw.raw[name]
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if is_dataclass(item):
            return tuple(_decoded(item, each) for each in raw.subs(name))  # type: ignore[arg-type]
        return raw.texts(name)
    if isinstance(hint, UnionType):
        if value is None:
            return None
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if hint is bool:
        return raw.flag(name)
    if hint is int:
        return raw.integer(name, high=int(_LARGEST))
    if hint is float:
        return inf if value is None else raw.number(name, high=_LARGEST)
    if hint is str:
        if value is None:
            raise InvalidField(raw.at(name), value, "a text")
        return raw.text(name, "")
    if issubclass(hint, Enum):
        return raw.name(name, hint)
    return _decoded(hint, Fields(value, raw.at(name)))
