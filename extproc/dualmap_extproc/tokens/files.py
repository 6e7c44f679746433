"""Tokenizes requests with the files of a model: tokenizer.json, tokenizer_config.json and the chat template."""

import json
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fastokens import Tokenizer

from dualmap.prompts.api import Api
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.template import ChatTemplate, TemplateFault

MAX_BYTES: Final = 64 * 1024 * 1024
"""The largest file of a tokenizer. The largest tokenizer.json of a public model has about 35 MB."""
CACHE_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of text and ids that one tokenizer keeps, so that text seen before is not tokenized again."""
NAMES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The self-check of the cache puts these texts between special tokens, of which it takes so many.
_SAMPLES: Final = ("", " a", "a b", "Ünï\n\n\tcode ", "'MM don't")
_SAMPLED: Final = 64
# Fields that change a prompt in ways that only the engine knows, or by token ids of the client.
_CHAT_UNSUPPORTED: Final = (
    *("chat_template", "continue_final_message", "add_special_tokens", "echo", "input_ids", "kv_transfer_params"),
    *("truncate_prompt_tokens", "mm_processor_kwargs", "functions", "prompt_token_ids", "prompt_embeds"),
)
_COMPLETIONS_UNSUPPORTED: Final = (
    *("suffix", "prompt_embeds", "truncate_prompt_tokens", "kv_transfer_params", "input_ids", "prompt_token_ids"),
)


class TokenizerError(Exception):
    """A tokenizer folder that cannot be used; the text names the file and the fault."""


class Cached(NamedTuple):
    """How many bytes of text were looked up in the cache of segments, and how many were found."""

    bytes: int
    of_bytes: int


class FilesTokenizer:
    """The tokenizer in one folder. Its methods may run in several threads at the same time."""

    def __init__(self, folder: str) -> None:
        """Read the folder. Raises TokenizerError."""
        path = Path(folder)
        text = _read(path / "tokenizer.json")
        config = _config(path)
        self._encoder = _encoder(path, text)
        special = _special_added_tokens(text)
        template = _chat_template(path, config)
        names = _special_tokens(config)
        try:
            self._templates = {name: ChatTemplate(source, names) for name, source in template.items()}
        except TemplateFault as fault:
            raise TokenizerError(f"{path}: {fault}") from fault
        # Where one special token may begin inside another one, text cannot be cut at special tokens.
        self.cached = bool(special) and not _overlap(special)
        if self.cached:
            self._encoder.enable_segment_cache(CACHE_BYTES)
            if not self._agrees_with(_encoder(path, text), special):
                self._encoder.enable_segment_cache(0)
                self.cached = False

    def ids(self, body: object, api: Api) -> "array[int]":
        """Return the token ids of a parsed request body. Raises UnsupportedRequest if they cannot be computed."""
        if not isinstance(body, dict):
            raise UnsupportedRequest("the body is not an object")
        if api is Api.CHAT or (api is Api.TOKENIZE and "messages" in body):
            return self._encode(self._chat(body), special=False)
        if api is Api.COMPLETIONS or (api is Api.TOKENIZE and "prompt" in body):
            return self._encode(_completion(body), special=body.get("add_special_tokens", True) is not False)
        raise UnsupportedRequest(f"requests of this API ({api.name.lower()}) need the source Renderer")

    def cache_use(self) -> Cached:
        """Return the use of the cache of segments since the tokenizer was read."""
        counts = self._encoder.segment_cache_stats() or {"hit_bytes": 0, "miss_bytes": 0}
        return Cached(bytes=counts["hit_bytes"], of_bytes=counts["hit_bytes"] + counts["miss_bytes"])

    def _chat(self, body: Mapping[str, object]) -> str:
        for name in _CHAT_UNSUPPORTED:
            if body.get(name):
                raise UnsupportedRequest(f"the field {name} needs the source Renderer")
        template = self._templates.get("tool_use") if body.get("tools") else None
        template = template or self._templates.get("default")
        if template is None:
            raise UnsupportedRequest("the tokenizer has no chat template")
        return template.render(body)

    def _encode(self, text: str, *, special: bool) -> "array[int]":
        return _flat(self._encoder, text, special=special)

    def _agrees_with(self, plain: Tokenizer, names: Sequence[str]) -> bool:
        """Return whether samples, whole and in parts, have the same ids with the cache as without it."""
        between = [f"{text}{name}" for name in names[:_SAMPLED] for text in _SAMPLES]
        whole = "".join(between)
        for special in (False, True):
            expected = _flat(plain, whole, special=special)
            if any(_flat(self._encoder, whole, special=special) != expected for _ in range(2)):
                return False
        # The parts that the library keeps are what it would tokenize alone.
        parts = [_flat(plain, each, special=False) for each in between]
        return sum(parts, array("I")) == _flat(self._encoder, whole, special=False)


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


def _flat(encoder: Tokenizer, text: str, *, special: bool) -> "array[int]":
    """Return the ids of a text. The encoder releases the interpreter's lock meanwhile, and creates no objects."""
    try:
        packed, _ = encoder.encode_batch_flat([text], add_special_tokens=special)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise UnsupportedRequest(f"the text cannot be tokenized: {error}") from error
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _encoder(path: Path, text: str) -> Tokenizer:
    try:
        encoder = Tokenizer.from_json_str(text)
        # The engine decides about lengths.
        encoder.no_truncation()
        encoder.no_padding()
    except Exception as error:
        raise TokenizerError(f"{path / 'tokenizer.json'}: {' '.join(str(error).split())[:200]}") from error
    return encoder


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TokenizerError(f"{path} is larger than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8") from error


def _object(path: Path) -> dict[str, object]:
    return _as_object(_read(path), path)


def _as_object(text: str, path: Path) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _config(path: Path) -> dict[str, object]:
    return _object(path / "tokenizer_config.json")


def _chat_template(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name: those of the configuration, or the one in a file of its own."""
    own = path / "chat_template.jinja"
    if own.exists():
        return {"default": _read(own)}
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


def _special_added_tokens(text: str) -> tuple[str, ...]:
    """Return the texts that become one token before anything else is tokenized, and stand for no text."""
    added = json.loads(text).get("added_tokens")
    tokens = [each for each in (added if isinstance(added, list) else []) if isinstance(each, dict)]
    contents = [each.get("content") for each in tokens if each.get("special") is True]
    return tuple(content for content in contents if isinstance(content, str) and content)


def _overlap(names: Collection[str]) -> bool:
    """Return whether one of the names contains another one, or ends as another one begins."""
    all_names = set(names)
    beginnings = {name[:end] for name in names for end in range(1, len(name))}
    return any(
        piece in all_names or (end == len(name) and piece in beginnings)
        for name in names
        for start in range(len(name))
        for end in range(start + 1, len(name) + 1)
        if (piece := name[start:end]) != name
    )
