"""What a container's ``command`` and ``args`` say on the engine's command line.

Read for ``checks`` and ``stopping`` only: nothing is ever added to them. Shell scripts are read as far as words go;
what only the container can know (variables, configuration files, wrapper scripts) stays unknown rather than guessed.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dualmap_operator.decide.workload.template import elements

SHUTDOWN_TIMEOUT: Final = "--shutdown-timeout"
PROMPT_TOKENS_DETAILS: Final = "--enable-prompt-tokens-details"
_CONFIG: Final = "--config"
_VLLM_MODULE: Final = "vllm.entrypoints"


def words(container: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of ``command`` and ``args``; one with blanks is taken apart, as in ``sh -c "vllm ..."``."""
    given = (*elements(container.get("command")), *elements(container.get("args")))
    return tuple(word for text in given if isinstance(text, str) for word in _split(text))


def runs_vllm(container: Mapping[str, Any]) -> bool:
    """Whether the words are vLLM's own: they name it, or go to the entry point of the image without naming another.

    A wrapper script may add flags of its own, and a configuration file holds more of them: False, nobody can tell.
    """
    given = words(container)
    if option(given, _CONFIG) is not None:
        return False
    named = any(word.rpartition("/")[2] == "vllm" or word.startswith(_VLLM_MODULE) for word in given)
    return named or not elements(container.get("command"))


def option(given: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, from ``--x=5`` and ``--x 5`` alike; None if it is not given.

    It is empty where nothing follows. vLLM takes underscores for dashes in names, so ``--x_y`` is read as ``--x-y``.
    """
    value = None
    for place, word in enumerate(given):
        key, equals, inner = word.partition("=")
        if not key.startswith("--") or key.replace("_", "-") != name:
            continue
        value = inner if equals else "".join(given[place + 1 : place + 2])
    return value


def whole_option(given: Sequence[str], name: str) -> int | None:
    """Return an option's value where it is a whole number, None where it is not given or not known before run time."""
    try:
        return int(option(given, name) or "")
    except ValueError:
        return None


def switched_on(given: Sequence[str], name: str) -> bool:
    """Whether a switch such as ``--enable-x`` is given, and not taken back by a later ``--no-enable-x``."""
    dashed = [word.replace("_", "-") for word in given]
    off = f"--no-{name.removeprefix('--')}"
    last = next((word for word in reversed(dashed) if word in (name, off)), off)
    return last == name


def _split(text: str) -> list[str]:
    if not any(letter.isspace() for letter in text):
        return [text]
    joined = text.replace("\\\n", " ")
    try:
        return shlex.split(joined, comments=True)
    except ValueError:  # Unbalanced quotes, as in a here-document: the words are still there.
        return joined.split()
