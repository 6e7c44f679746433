"""Tokenizes requests with the files of a model: ``rendering`` renders the text, and tokenizer.json splits it."""

import math
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
        self._encoder = _encoder(Path(folder) / VOCABULARY)
        self._texts = PromptTexts(folder)
        special = _special_added_tokens(self._encoder)
        # Where one special token may begin inside another one, text cannot be cut at special tokens.
        self.cached = bool(special) and not _overlap(special) and self._cache_is_right(special)
        if not self.cached:
            self._encoder.enable_segment_cache(0)

    @property
    def problem(self) -> str:
        """The reason why chat completions get no token ids; empty if they get token ids."""
        return self._texts.problem

    def ids(self, body: object, api: Api, within_s: float = math.inf) -> "array[int]":
        """Return the token ids of a parsed request body. Raises UnsupportedRequest if they cannot be computed.

        ``within_s`` is the most CPU time of the chat template.
        """
        return self.encoded(self._texts.rendered(body, api, within_s))

    def encoded(self, rendered: Rendered) -> "array[int]":
        """Return the token ids of a rendered prompt. Raises UnsupportedRequest if they cannot be computed."""
        return _flat(self._encoder, rendered.text, special=rendered.special)

    def cache_use(self) -> Cached:
        """Return the use of the cache of segments since the tokenizer was read."""
        counts = self._encoder.segment_cache_stats() or {"hit_bytes": 0, "miss_bytes": 0}
        return Cached(bytes=counts["hit_bytes"], of_bytes=counts["hit_bytes"] + counts["miss_bytes"])

    def _cache_is_right(self, names: Sequence[str]) -> bool:
        """Enable the cache; return whether samples have the same ids as without it, whole and in parts."""
        between = [f"{text}{name}" for name in names[:_SAMPLED] for text in _SAMPLES]
        whole = "".join(between)
        self._encoder.enable_segment_cache(0)
        expected = [_flat(self._encoder, whole, special=special) for special in (False, True)]
        # The parts that the library keeps are what it would tokenize alone.
        parts = [_flat(self._encoder, each, special=False) for each in between]
        self._encoder.enable_segment_cache(CACHE_BYTES)
        found = [[_flat(self._encoder, whole, special=special) for special in (False, True)] for _ in range(2)]
        return sum(parts, array("I")) == expected[0] and all(each == expected for each in found)


def _flat(encoder: Tokenizer, text: str, *, special: bool) -> "array[int]":
    """Return the ids of a text. The encoder releases the interpreter's lock meanwhile, and creates no objects."""
    try:
        packed, _ = encoder.encode_batch_flat([text], add_special_tokens=special)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the library is not an Exception.
        raise UnsupportedRequest(f"the text cannot be tokenized: {error}") from error
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _encoder(path: Path) -> Tokenizer:
    try:
        encoder = Tokenizer.from_json_str(read_file(path))
        # The engine decides about lengths.
        encoder.no_truncation()
        encoder.no_padding()
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    return encoder


def _special_added_tokens(encoder: Tokenizer) -> tuple[str, ...]:
    """Return the texts that become one token before anything else is tokenized, and stand for no text."""
    return tuple(each["content"] for each in encoder.added_tokens() if each["special"] and each["content"])


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
