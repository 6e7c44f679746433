"""Reads llm-d's plugins for prefill and decode on different pods.

In llm-d, a profile handler chooses a decode pod first. A decider then says whether a prefill pod computes the prompt,
by the number of tokens that are not cached at the decode pod. The router's own prefills follow the same rule
(``dualmap.remote_prefills``), so the plugins become a number of tokens and the use of the pods' roles.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.errors import PoolError
from dualmap_extproc.epp.fields import checked_mapping, mapping_at, text_at

_DECODE_FILTER: Final = "decode-filter"
_HANDLER: Final = "disagg-profile-handler"
# The older handler, in which a decider of this name is the default.
_OLD_HANDLER: Final = "pd-profile-handler"
_BY_PREFIX: Final = "prefix-based-pd-decider"
_ALWAYS: Final = "always-disagg-pd-decider"
_PREFILL_FILTER: Final = "prefill-filter"
_STAGE_ORDER: Final = "stageOrder"
_DECODE_FIRST: Final = "decode-first"
_TOKENS: Final = "nonCachedTokens"
_PROMPT_TOKENS: Final = "promptTokens"
_TOKENS_MAX: Final = 100_000_000
_STAGES: Final = ("decode", "prefill", "encode")
# The names of the parameters with a prefill's decider: outside ``deciders``, they are from older versions.
_FLAT_DECIDERS: Final = ("prefillDeciderPluginName", "deciderPluginName")
_FLAT_PROFILES: Final = ("decodeProfile", "prefillProfile", "encodeProfile")
_OLD_ENCODER: Final = "encodeDeciderPluginName"
# The parameters of each type; a handler has nested or flat ones. None: llm-d does not read them.
_NESTED: Final = frozenset((_STAGE_ORDER, "profiles", "deciders"))
_FLAT: Final = frozenset((_STAGE_ORDER, *_FLAT_PROFILES, *_FLAT_DECIDERS, _OLD_ENCODER))
_PARAMETERS: Final[Mapping[str, frozenset[str] | None]] = {
    _HANDLER: _NESTED | _FLAT,
    _OLD_HANDLER: frozenset(
        (
            *("decodeProfile", "prefillProfile", "deciderPluginName", "primaryPort"),
            *("prefixPluginType", "prefixPluginName", "prefixMatchInfoProducerName"),
        )
    ),
    _BY_PREFIX: frozenset((_TOKENS, _PROMPT_TOKENS)),
    **dict.fromkeys((_DECODE_FILTER, _PREFILL_FILTER, _ALWAYS)),
    # The router itself names the prefill pod in the request's header.
    **dict.fromkeys(("prefill-header-handler", "disagg-headers-handler"), frozenset(_FLAT_PROFILES[1:])),
}
TYPES: Final = _PARAMETERS.keys()
"""The types of the plugins that this module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin of a configuration; ``place`` is where it is, for messages."""

    place: str
    type: str
    name: str
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUse:
    """How the roles of pods count. If they are not ``respected``, every pod serves whole requests.

    ``prefill_min_tokens`` is the least number of uncached tokens of a prompt that a pod for prefills computes; None: no
    pods for prefills are used.
    """

    respected: bool
    prefill_min_tokens: int | None = None


ANY_ROLE: Final = RoleUse(respected=False)


def read_role_use(plugins: Sequence[Plugin], profiles: Collection[str]) -> tuple[RoleUse, tuple[str, ...]]:
    """Return how a configuration uses the roles of pods, and its parts without effect, each with its reason.

    ``profiles`` are the names of its scheduling profiles. Raises PoolError.
    """
    unused: list[str] = []
    for each in plugins:
        if each.type in TYPES:
            _check_parameters(each, unused)
    _check_prefills_only(plugins)
    handlers = [each for each in plugins if each.type in (_HANDLER, _OLD_HANDLER)]
    least = [tokens for each in handlers if (tokens := _prefill_min_tokens(each, plugins, profiles, unused))]
    respected = bool(least) or any(each.type == _DECODE_FILTER for each in plugins)
    return RoleUse(respected=respected, prefill_min_tokens=min(least, default=None)), tuple(unused)


def _check_parameters(plugin: Plugin, unused: list[str]) -> None:
    """Raise PoolError for an unknown parameter; add what llm-d does not read to ``unused``."""
    known = _PARAMETERS[plugin.type]
    if known is not None:
        checked_mapping(plugin.parameters, f"{plugin.place}.parameters", known, f"a parameter of {plugin.type}")
    elif plugin.parameters:
        unused.append(f"{plugin.place}.parameters: {plugin.type} has no parameters")


def _check_prefills_only(plugins: Sequence[Plugin]) -> None:
    """Raise PoolError for a picker that only chooses pods for prefills, because the members are pods that decode."""
    types = {each.type for each in plugins}
    if not types & {_DECODE_FILTER, _HANDLER, _OLD_HANDLER}:
        for each in plugins:
            if each.type == _PREFILL_FILTER:
                accepted = (
                    f"{_PREFILL_FILTER} only with {_HANDLER} or {_DECODE_FILTER}: the members are pods that decode"
                )
                raise PoolError(f"{each.place}.type", each.type, accepted)


def _prefill_min_tokens(
    handler: Plugin, plugins: Sequence[Plugin], profiles: Collection[str], unused: list[str]
) -> int | None:
    """Return from how many uncached tokens a profile handler wants a prefill on another pod; None: it wants none."""
    parameters, place = handler.parameters, f"{handler.place}.parameters"
    nested = parameters.keys() & {"profiles", "deciders"}
    if nested and (flat := sorted(parameters.keys() & _FLAT - _NESTED)):
        accepted = f"{_HANDLER} either with profiles and deciders, or with the older parameters: {', '.join(flat)}"
        raise PoolError(f"{place}.{min(nested)}", parameters[min(nested)], accepted)
    _check_decode_first(parameters, place)
    decode, prefill = _read_profiles(parameters, place)
    if decode not in profiles:
        accepted = f"a profile with the name {decode}, which {handler.type} uses for each request"
        raise PoolError("schedulingProfiles", sorted(profiles) or None, accepted)
    decider = _find_decider(handler, plugins, place)
    if decider is None:
        return None
    tokens = 1 if decider.type == _ALWAYS else _read_tokens(decider, unused)
    if tokens and prefill not in profiles:
        unused.append(f"{decider.place}: schedulingProfiles has no profile with the name {prefill}")
        return None
    return tokens


def _read_profiles(parameters: Mapping[str, object], place: str) -> tuple[str, str]:
    """Return the names of the profiles for decode and for prefill."""
    nested, nested_place = mapping_at(parameters, "profiles", place, _STAGES), f"{place}.profiles"
    decode = text_at(parameters, "decodeProfile", place, "decode")
    prefill = text_at(parameters, "prefillProfile", place, "prefill")
    return text_at(nested, "decode", nested_place, decode), text_at(nested, "prefill", nested_place, prefill)


def _check_decode_first(parameters: Mapping[str, object], place: str) -> None:
    order = text_at(parameters, _STAGE_ORDER, place, _DECODE_FIRST)
    # llm-d reads the order without regard to case, hyphens and underscores.
    if order.lower().replace("-", "").replace("_", "") not in ("decodefirst", "decode"):
        accepted = f"{_DECODE_FIRST}, the order in which the router chooses pods"
        raise PoolError(f"{place}.{_STAGE_ORDER}", order, accepted)


def _find_decider(handler: Plugin, plugins: Sequence[Plugin], place: str) -> Plugin | None:
    """Return the decider that a handler names, or its default; None: it has none."""
    parameters = handler.parameters
    deciders = mapping_at(parameters, "deciders", place, _STAGES[1:])
    for mapping, key, at in ((deciders, "encode", f"{place}.deciders"), (parameters, _OLD_ENCODER, place)):
        if encoder := text_at(mapping, key, at):
            raise PoolError(f"{at}.{key}", encoder, "no decider for encode: pods that only encode are not supported")
    places = (deciders, "prefill", f"{place}.deciders"), *((parameters, each, place) for each in _FLAT_DECIDERS)
    accepted = f"the name of a plugin in plugins, of the type {_BY_PREFIX} or {_ALWAYS}"
    for mapping, key, at in places:
        if name := text_at(mapping, key, at):
            found = _decider(name, plugins)
            if found is None:
                raise PoolError(f"{at}.{key}", name, accepted)
            return found
    if handler.type == _HANDLER:
        return None
    found = _decider(_BY_PREFIX, plugins)
    if found is None:
        accepted = f"{accepted}; without it, a plugin with the name {_BY_PREFIX} is needed"
        raise PoolError(f"{place}.deciderPluginName", None, accepted)
    return found


def _decider(name: str, plugins: Sequence[Plugin]) -> Plugin | None:
    return next((each for each in plugins if each.name == name and each.type in (_BY_PREFIX, _ALWAYS)), None)


def _read_tokens(decider: Plugin, unused: list[str]) -> int:
    tokens, prompt = (_read_count(decider, each) for each in (_TOKENS, _PROMPT_TOKENS))
    if tokens and prompt > tokens:
        reason = f"only uncached tokens count, against {_TOKENS}"
        unused.append(f"{decider.place}.parameters.{_PROMPT_TOKENS}: {reason}")
    return tokens


def _read_count(decider: Plugin, key: str) -> int:
    tokens = decider.parameters.get(key) or 0
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _TOKENS_MAX:
        accepted = f"a whole number from 0 to {_TOKENS_MAX}; 0 lets decode pods compute all prompts"
        raise PoolError(f"{decider.place}.parameters.{key}", tokens, accepted)
    return tokens
