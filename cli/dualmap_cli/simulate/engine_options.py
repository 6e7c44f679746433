"""The parameters of the engine model that ``--set NAME=NUMBER`` changes (docs/engine-model.md)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from dualmap_sim.presets import EngineConfig

if TYPE_CHECKING:
    from dualmap_cli.engine_file import EngineFile

_HINT: Final = "--set"
_SPEED_MOST: Final = 1e12
_SECONDS_MOST: Final = 1e4
_TOKENS_MOST: Final = 10**12
"""No engine exceeds these bounds, and with larger values some runs would never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number of the engine model: its meaning, its bounds and how to set it in a config."""

    meaning: str
    least: float
    most: float
    whole: bool
    decodes: bool = False
    """Whether only engines with a decode phase have the parameter."""
    change: Callable[[EngineConfig, float], EngineConfig]


def _prefill(field: str, meaning: str, least: float, most: float) -> Parameter:
    def change(config: EngineConfig, value: float) -> EngineConfig:
        return replace(config, prefill=replace(config.prefill, **{field: value}))

    return Parameter(meaning=meaning, least=least, most=most, whole=False, change=change)


def _decode(field: str, meaning: str, least: float, most: float) -> Parameter:
    def change(config: EngineConfig, value: float) -> EngineConfig:
        assert config.decode is not None, "changed() refuses parameters of decoding for a prefill-only engine"
        return replace(config, decode=replace(config.decode, **{field: value}))

    return Parameter(meaning=meaning, least=least, most=most, whole=False, decodes=True, change=change)


def _whole(field: str, meaning: str, least: int) -> Parameter:
    def change(config: EngineConfig, value: float) -> EngineConfig:
        fields: dict[str, Any] = {field: int(value)}
        return replace(config, **fields)

    return Parameter(meaning=meaning, least=least, most=_TOKENS_MOST, whole=True, change=change)


def _pull(config: EngineConfig, value: float) -> EngineConfig:
    return replace(config, pull_tokens_per_s=value)


PARAMETERS: Final[Mapping[str, Parameter]] = MappingProxyType(
    {
        "r": _prefill("tokens_per_s", "new prompt tokens computed per second", 1.0, _SPEED_MOST),
        "a": _prefill("attention", "relative growth of a token's cost per preceding token", 0.0, 1e3),
        "o": _prefill("overhead_s", "fixed seconds of every prefill", 0.0, _SECONDS_MOST),
        "l": _prefill("load_tokens_per_s", "cached tokens loaded per second", 1.0, _SPEED_MOST),
        "m": _whole("kv_memory_tokens", "KV memory for admitted requests, in tokens", 1),
        "c": _whole("cache_tokens", "prefix cache, in tokens", 0),
        "cap": _whole("input_tokens_max", "longest prompt; longer ones are cut", 1),
        "d0": _decode("step_s", "seconds of a decode step", 1e-6, _SECONDS_MOST),
        "d1": _decode("per_kv_token_s", "... plus seconds per KV token held", 0.0, _SECONDS_MOST),
        "d2": _decode("per_request_s", "... plus seconds per request of the batch", 0.0, _SECONDS_MOST),
        "block": _whole("block_tokens", "block size of the prefix cache, in tokens", 1),
        "chunk": _whole("chunk_tokens", "chunked prefill: tokens per step", 1),
        "pull": Parameter(
            meaning="tokens per second when a session's KV moves to another engine",
            least=1.0,
            most=_SPEED_MOST,
            whole=False,
            change=_pull,
        ),
    }
)
"""The parameters by name. The names are those of docs/engine-model.md, if the page has the parameter."""


def described() -> str:
    """Return the parameters for ``--help``, one per line."""
    return "\n".join(f"  {name:<6} {parameter.meaning}" for name, parameter in PARAMETERS.items())


def changed(config: EngineConfig, values: Iterable[tuple[str, float]], *, hint: str = _HINT) -> EngineConfig:
    """Return an engine with some parameters changed. Raises click.BadParameter for an invalid name or value.

    ``hint`` is the option that the values are from.
    """
    for name, value in values:
        parameter = PARAMETERS.get(name)
        if parameter is None:
            raise click.BadParameter(f"{name!r} is not accepted; give one of {', '.join(PARAMETERS)}", param_hint=hint)
        if not parameter.least <= value <= parameter.most or (parameter.whole and value != int(value)):
            what = "a whole number" if parameter.whole else "a number"
            raise click.BadParameter(
                f"{name}={value:g} is not accepted; give {what} from {parameter.least:g} to {parameter.most:g}",
                param_hint=hint,
            )
        if parameter.decodes and config.decode is None:
            raise click.BadParameter(
                f"{name}={value:g} is not accepted: a prefill-only engine has no decode steps; give another --model",
                param_hint=hint,
            )
        config = parameter.change(config, value)
    return config


def read_engine_file(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> "EngineFile | None":
    """Read the file of an engine, None without a file. Raises BadParameter."""
    if value is None:
        return None
    # Imported here because YAML takes a tenth of a second to load.
    from dualmap_cli.engine_file import EngineFileError, read_engine

    try:
        return read_engine(value)
    except EngineFileError as error:
        raise click.BadParameter(str(error)) from error
