"""Reads llm-d's plugins for prefill and decode on different pods.

In llm-d, a profile handler chooses a decode pod first. A decider then says whether a prefill pod computes the prompt,
by the number of tokens that are not cached at the decode pod. The router's own prefills follow the same rule
(``dualmap.remote_prefills``), so the plugins become a number of tokens and the use of the pods' roles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.errors import PoolError

_DECODE_FILTER: Final = "decode-filter"
_HANDLER: Final = "disagg-profile-handler"
# The older handler, in which a decider of this name is the default.
_OLD_HANDLER: Final = "pd-profile-handler"
_BY_PREFIX: Final = "prefix-based-pd-decider"
_ALWAYS: Final = "always-disagg-pd-decider"
_PREFILL_FILTER: Final = "prefill-filter"
_STAGE_ORDER: Final = "stageOrder"
_DECODE_FIRST: Final = "decode-first"
TYPES: Final = frozenset(
    (
        *(_DECODE_FILTER, _PREFILL_FILTER, _HANDLER, _OLD_HANDLER, _BY_PREFIX, _ALWAYS),
        # The router itself names the prefill pod in the request's header.
        *("prefill-header-handler", "disagg-headers-handler"),
    )
)
"""The types of the plugins that this module reads."""
_TOKENS: Final = "nonCachedTokens"
_TOKENS_MAX: Final = 100_000_000
# The names of the parameter for the prefill's decider: outside ``deciders``, they are from older versions.
_FLAT_DECIDERS: Final = ("prefillDeciderPluginName", "deciderPluginName")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin of a configuration; ``field`` is its place, for messages."""

    field: str
    type: str
    name: str
    parameters: Mapping[object, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUse:
    """How the roles of pods count. If they are not ``respected``, every pod serves whole requests.

    ``prefill_min_tokens`` is the least number of uncached tokens of a prompt that a pod for prefills computes; None: no
    pods for prefills are used.
    """

    respected: bool
    prefill_min_tokens: int | None = None


ANY_ROLE: Final = RoleUse(respected=False)


def read_role_use(plugins: Sequence[Plugin]) -> RoleUse:
    """Return how the plugins of a configuration use the roles of pods. Raises PoolError."""
    _check_prefills_only(plugins)
    least = [tokens for each in plugins if (tokens := _prefill_min_tokens(each, plugins)) is not None]
    if least:
        return RoleUse(respected=True, prefill_min_tokens=min(least))
    return RoleUse(respected=True) if any(each.type == _DECODE_FILTER for each in plugins) else ANY_ROLE


def _check_prefills_only(plugins: Sequence[Plugin]) -> None:
    """Raise PoolError for a picker that only chooses pods for prefills, because the members are pods that decode."""
    types = {each.type for each in plugins}
    if not types & {_DECODE_FILTER, _HANDLER, _OLD_HANDLER}:
        for each in plugins:
            if each.type == _PREFILL_FILTER:
                accepted = (
                    f"{_PREFILL_FILTER} only with {_HANDLER} or {_DECODE_FILTER}: the members are pods that decode"
                )
                raise PoolError(f"{each.field}.type", each.type, accepted)


def _prefill_min_tokens(handler: Plugin, plugins: Sequence[Plugin]) -> int | None:
    """Return from how many uncached tokens a profile handler wants a prefill on another pod; None: it wants none."""
    if handler.type not in (_HANDLER, _OLD_HANDLER):
        return None
    nested = handler.parameters.get("deciders") or {}
    if not isinstance(nested, Mapping):
        raise PoolError(f"{handler.field}.parameters.deciders", nested, "a mapping of prefill to the name of a decider")
    if encoder := nested.get("encode") or handler.parameters.get("encodeDeciderPluginName"):
        accepted = "no decider for encode: pods that only encode are not supported"
        raise PoolError(f"{handler.field}.parameters.deciders.encode", encoder, accepted)
    order = handler.parameters.get(_STAGE_ORDER) or _DECODE_FIRST
    if order != _DECODE_FIRST:
        accepted = f"{_DECODE_FIRST}, the order in which the router chooses pods"
        raise PoolError(f"{handler.field}.parameters.{_STAGE_ORDER}", order, accepted)
    flat = (handler.parameters.get(each) for each in _FLAT_DECIDERS)
    default = _BY_PREFIX if handler.type == _OLD_HANDLER else None
    wanted = nested.get("prefill") or next((each for each in flat if each), default)
    if wanted is None:
        return None
    for each in plugins:
        if each.name == wanted and each.type == _ALWAYS:
            return 1
        if each.name == wanted and each.type == _BY_PREFIX:
            return _read_tokens(each)
    accepted = f"the name of a plugin in plugins, of the type {_BY_PREFIX} or {_ALWAYS}"
    raise PoolError(f"{handler.field}.parameters.deciders.prefill", wanted, accepted)


def _read_tokens(decider: Plugin) -> int | None:
    tokens = decider.parameters.get(_TOKENS, 0)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _TOKENS_MAX:
        accepted = f"a whole number from 0 to {_TOKENS_MAX}; 0 lets decode pods compute all prompts"
        raise PoolError(f"{decider.field}.parameters.{_TOKENS}", tokens, accepted)
    return tokens or None
