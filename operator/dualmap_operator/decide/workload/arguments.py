"""Reads the engine's command line from a container's ``command`` and ``args``.

``checks`` and ``termination`` use this module; no function changes the command line. Shell scripts are split into
words. A value that is known only at run time counts as unknown: a variable, or a flag in a configuration file or
wrapper script.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dualmap_operator.decide.workload.template import elements

SHUTDOWN_TIMEOUT: Final = "--shutdown-timeout"
PROMPT_TOKENS_DETAILS: Final = "--enable-prompt-tokens-details"
KV_EVENTS_CONFIG: Final = "--kv-events-config"
_CONFIG: Final = "--config"
_VLLM_MODULE: Final = "vllm.entrypoints"


def words(container: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of ``command`` and ``args``; elements with spaces are split, as in ``sh -c "vllm ..."``."""
    return tuple(word for text in _texts(container) for word in _split(text))


def runs_vllm(container: Mapping[str, Any]) -> bool:
    """Return whether vLLM receives these words: vLLM is among them, or no command replaces the image's entry point.

    The result is False for another command or a configuration file, because both may set further flags.
    """
    given = words(container)
    if option(given, _CONFIG) is not None:
        return False
    named = any(word.rpartition("/")[2] == "vllm" or word.startswith(_VLLM_MODULE) for word in given)
    return named or not elements(container.get("command"))


def option(given: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, from ``--x=5`` or ``--x 5``; None if the option is missing.

    The value is empty if no word follows the option. ``--x_y`` equals ``--x-y``, because vLLM accepts underscores in
    names.
    """
    value = None
    for place, word in enumerate(given):
        key, equals, inner = word.partition("=")
        if not key.startswith("--") or key.replace("_", "-") != name:
            continue
        value = inner if equals else "".join(given[place + 1 : place + 2])
    return value


def whole_option(given: Sequence[str], name: str) -> int | None:
    """Return an option's integer value; None if the option is missing or its value is unknown."""
    try:
        return int(option(given, name) or "")
    except ValueError:
        return None


def mentions(container: Mapping[str, Any], name: str) -> bool:
    """Return whether an option occurs anywhere in ``command`` and ``args``, also with a suffix or inside a script."""
    return any(name in text.replace("_", "-") for text in _texts(container))


def json_option(container: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return an option's JSON object; None if the option is missing or its value is unknown.

    Only an element of its own is read, because a shell changes the quotes in a script.
    """
    given, value = _texts(container), None
    for place, text in enumerate(given):
        key, equals, inner = text.partition("=")
        if key.replace("_", "-") == name:
            value = inner if equals else "".join(given[place + 1 : place + 2])
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None


def switched_on(given: Sequence[str], name: str) -> bool:
    """Return whether a flag such as ``--enable-x`` is present without a later ``--no-enable-x``."""
    dashed = [word.replace("_", "-") for word in given]
    off = f"--no-{name.removeprefix('--')}"
    last = next((word for word in reversed(dashed) if word in (name, off)), off)
    return last == name


def _texts(container: Mapping[str, Any]) -> tuple[str, ...]:
    given = (*elements(container.get("command")), *elements(container.get("args")))
    return tuple(text for text in given if isinstance(text, str))


def _split(text: str) -> list[str]:
    if not any(letter.isspace() for letter in text):
        return [text]
    joined = text.replace("\\\n", " ")
    try:
        return shlex.split(joined, comments=True)
    except ValueError:  # The quotes are unbalanced, as in a here-document.
        return joined.split()
