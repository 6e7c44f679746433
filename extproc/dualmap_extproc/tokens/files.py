"""Tokenizes requests with the files of a model: ``rendering`` renders the text, and tokenizer.json splits it."""

import json
import sys
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fastokens import Tokenizer

from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Rendered
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.rendering import PromptTexts, TokenizerError, read_file

CACHE_BYTES: Final = 32 * 1024 * 1024
"""The most bytes of text and ids that one tokenizer keeps, so that text seen before is not tokenized again."""
VOCABULARY: Final = "tokenizer.json"
# The self-check of the cache puts these texts between special tokens, of which it takes so many.
_SAMPLES: Final = ("", " a", "a b", "Ünï\n\n\tcode ", "'MM don't")
_SAMPLED: Final = 64


class Cached(NamedTuple):
    """How many bytes of text were looked up in the cache of segments, and how many were found."""

    bytes: int
    of_bytes: int


class FilesTokenizer:
    """The tokenizer in one folder. Its methods may run in several threads at the same time."""

    def __init__(self, folder: str) -> None:
        """Read the folder. Raises TokenizerError."""
        path = Path(folder) / VOCABULARY
        text = read_file(path)
        self._encoder = _encoder(path, text)
        special = _special_added_tokens(text)
        self._texts = PromptTexts(folder)
        # Where one special token may begin inside another one, text cannot be cut at special tokens.
        self.cached = bool(special) and not _overlap(special)
        if self.cached:
            self._encoder.enable_segment_cache(CACHE_BYTES)
            if not self._agrees_with(_encoder(path, text), special):
                self._encoder.enable_segment_cache(0)
                self.cached = False

    def ids(self, body: object, api: Api) -> "array[int]":
        """Return the token ids of a parsed request body. Raises UnsupportedRequest if they cannot be computed."""
        return self.encoded(self._texts.rendered(body, api))

    def encoded(self, rendered: Rendered) -> "array[int]":
        """Return the token ids of a rendered prompt. Raises UnsupportedRequest if they cannot be computed."""
        return _flat(self._encoder, rendered.text, special=rendered.special)

    def cache_use(self) -> Cached:
        """Return the use of the cache of segments since the tokenizer was read."""
        counts = self._encoder.segment_cache_stats() or {"hit_bytes": 0, "miss_bytes": 0}
        return Cached(bytes=counts["hit_bytes"], of_bytes=counts["hit_bytes"] + counts["miss_bytes"])

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
        raise TokenizerError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    return encoder


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
