"""Renders requests to the text that an engine tokenizes, with tokenizer_config.json and the chat template of a model.

The reading processes use this module as well, so it imports no tokenizer.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Rendered
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.template import ChatTemplate, TemplateFault

MAX_BYTES: Final = 64 * 1024 * 1024
"""The largest file of a tokenizer. The largest tokenizer.json of a public model has about 35 MB."""
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields that change a prompt in ways that only the engine knows, or by token ids of the client.
_CHAT_UNSUPPORTED: Final = (
    *("chat_template", "continue_final_message", "add_special_tokens", "echo", "input_ids", "kv_transfer_params"),
    *("truncate_prompt_tokens", "mm_processor_kwargs", "functions", "prompt_token_ids", "prompt_embeds"),
)
_COMPLETIONS_UNSUPPORTED: Final = (
    *("suffix", "prompt_embeds", "truncate_prompt_tokens", "kv_transfer_params", "input_ids", "prompt_token_ids"),
)

Version: TypeAlias = tuple[tuple[int, int, int], ...]
"""What changes when a file of a folder changes."""


class TokenizerError(Exception):
    """A tokenizer folder that cannot be used; the text names the file and the fault."""


class PromptTexts:
    """The chat templates in one folder. ``rendered`` may run in several threads at the same time."""

    def __init__(self, folder: str) -> None:
        """Read the folder. Raises TokenizerError."""
        path = self._path = Path(folder)
        config = _object(path / CONFIG)
        names = _special_tokens(config)
        sources = _chat_template(path, config)
        try:
            self._templates = {name: ChatTemplate(source, names) for name, source in sources.items()}
        except TemplateFault as fault:
            raise TokenizerError(f"{path}: {fault}") from fault

    @property
    def problem(self) -> str:
        """Why chat completions have no text; empty if they have."""
        if "default" not in self._templates:
            return f"{self._path} has no chat template"
        found = next((each.problem for each in self._templates.values() if each.problem), "")
        return found and f"{self._path}: {found}"

    def rendered(self, body: object, api: Api, within_s: float = math.inf) -> Rendered:
        """Return the text of a parsed request body. Raises UnsupportedRequest if it cannot be computed.

        ``within_s`` is the most CPU time of a chat template.
        """
        if not isinstance(body, dict):
            raise UnsupportedRequest("the body is not an object")
        if api is Api.CHAT or (api is Api.TOKENIZE and "messages" in body):
            return Rendered(self._chat(body, within_s), special=False)
        if api is Api.COMPLETIONS or (api is Api.TOKENIZE and "prompt" in body):
            return Rendered(_completion(body), special=body.get("add_special_tokens", True) is not False)
        raise UnsupportedRequest(f"requests of this API ({api.name.lower()}) need the source Renderer")

    def _chat(self, body: Mapping[str, object], within_s: float) -> str:
        for name in _CHAT_UNSUPPORTED:
            if body.get(name):
                raise UnsupportedRequest(f"the field {name} needs the source Renderer")
        template = self._templates.get("tool_use") if body.get("tools") else None
        template = template or self._templates.get("default")
        if template is None:
            raise UnsupportedRequest("the tokenizer has no chat template")
        return template.render(body, within_s)


def read_file(path: Path) -> str:
    """Return the text of a file of a tokenizer. Raises TokenizerError."""
    try:
        with open(path, encoding="utf-8", opener=_open_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise TokenizerError(f"{path} is not a regular file")
            if found.st_size > MAX_BYTES:
                raise TokenizerError(f"{path} is larger than {MAX_BYTES} bytes")
            return file.read(MAX_BYTES)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8") from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a named pipe does not wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def version_of(folder: str, *names: str) -> Version:
    """Return the version of the files ``names`` in a folder."""
    stats = []
    for name in names:
        try:
            found = (Path(folder) / name).stat()
        except OSError:
            stats.append((0, 0, 0))
        else:
            stats.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(stats)


def _completion(body: Mapping[str, object]) -> str:
    for name in _COMPLETIONS_UNSUPPORTED:
        if body.get(name):
            raise UnsupportedRequest(f"the field {name} needs the source Renderer")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UnsupportedRequest("the prompt is not one text")
    return prompt


def _object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _chat_template(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name: those of the configuration, or the one in a file of its own."""
    own = path / TEMPLATE
    if own.exists():
        return {"default": read_file(own)}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    named = template if isinstance(template, list) else []
    pairs = [(each.get("name"), each.get("template")) for each in named if isinstance(each, dict)]
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def _special_tokens(config: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
