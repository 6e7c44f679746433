"""Request bodies of conversations: a long prefix that was sent before, and a few new bytes.

``load`` sends the bodies. The module copies little data, so that a body of 220 KB costs the client little time.
"""

from collections.abc import Iterator
from itertools import count

MODEL = "bench"
TURNS = 8
_FILLER = b"All work and no play makes Jack a dull boy. "
_DIGITS = 12


def bodies(size_bytes: int, *, streamed: bool, first: int) -> Iterator[tuple[bytes, bytes, bytes, bytes, bytes]]:
    """Yield chat bodies of exactly ``size_bytes`` in five pieces, without end.

    Every conversation has ``TURNS`` requests. The prompt starts with the conversation's number, so conversations share
    no blocks. The prompt ends with the turn's number. Conversations are numbered from ``first``.
    """
    head = b'{"model": "%s", "messages": [{"role": "user", "content": "conversation ' % MODEL.encode()
    tail = b'"}], "stream": %s}' % (b"true" if streamed else b"false")
    room = size_bytes - len(head) - len(tail) - 2 * _DIGITS
    assert room >= 0, f"no chat body has only {size_bytes} bytes"
    filler = (_FILLER * (room // len(_FILLER) + 1))[:room]
    for conversation in count(first):
        for turn in range(TURNS):
            yield head, b"%012d" % conversation, filler, b"%012d" % turn, tail
