"""Encodes in canonical CBOR (RFC 8949, section 4.2.1) what vLLM and Llumnix hash: a text, or a block of token ids."""

from collections.abc import Iterable
from typing import Final

_BYTES: Final = 2
_TEXT: Final = 3
_LIST: Final = 4
_NIL: Final = b"\xf6"
# The largest value in the first byte, and the additional information for each longer form.
_INLINE_MAX: Final = 23
_WIDTHS: Final = ((1, 24), (2, 25), (4, 26), (8, 27))


def encode_text(text: str) -> bytes:
    """Return the encoding of a text."""
    encoded = text.encode()
    return _head(_TEXT, len(encoded)) + encoded


class BlockEncoder:
    """Encodes blocks of token ids. It keeps the encodings of ids, because prompts share most of their ids."""

    def __init__(self) -> None:
        self._encodings = _Encodings()

    def __len__(self) -> int:
        return len(self._encodings)

    def encode(self, parent: bytes, ids: Iterable[int], count: int) -> bytes:
        """Return the encoding of the list of ``parent``, the list of the ``count`` ids, and nil."""
        encoded = b"".join(map(self._encodings.__getitem__, ids))
        return _head(_LIST, 3) + _head(_BYTES, len(parent)) + parent + _head(_LIST, count) + encoded + _NIL


class _Encodings(dict[int, bytes]):
    """The encodings of ids. A dict, because a call for each id of a prompt would take several times longer."""

    def __missing__(self, value: int) -> bytes:
        encoded = _head(0, value)
        if len(self) < IDS_MAX:
            self[value] = encoded
        return encoded


IDS_MAX: Final = 2**18
"""The most ids whose encodings are kept: more than most vocabularies have, and about 20 MB."""


def _head(kind: int, value: int) -> bytes:
    """Return the first bytes of an item: its kind, and its value or length."""
    if value <= _INLINE_MAX:
        return bytes((kind << 5 | value,))
    width, information = next(each for each in _WIDTHS if value < 1 << 8 * each[0])
    return bytes((kind << 5 | information,)) + value.to_bytes(width)
