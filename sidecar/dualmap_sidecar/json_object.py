"""The members of a JSON object as bytes: a body is changed in some members, and stays identical in all others.

Both legs of a request must have the same prompt, byte for byte. A parser and a writer would change the spelling of
numbers, escapes and repeated names. The scanner finds the ends of the top-level members only, and creates no objects
for their values.

The scanner accepts every JSON object, and some invalid ones. An edited object is valid only if the scanner has found
its members correctly: it consists of these members, and scanning it finds the same ones. So an edit never leaves a
removed name in a body that an engine can read.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Self

from dualmap_sidecar.errors import UnreadableBody

ELEMENTS_MAX: Final = 1_000_000
"""The most strings, objects and lists in a body, which bounds the time of a scan."""

_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^\s,\]}]++")
_STRUCTURE: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]"]', re.DOTALL)
_OPENING: Final = (b"{", b"[")
_CLOSING: Final = (b"}", b"]")


@dataclass(frozen=True, slots=True)
class _Member:
    """A member: its name, and the places of its name, its value's beginning and its value's end."""

    name: str
    at: int
    value_at: int
    end: int


class JsonObject:
    """A JSON object, split into its members."""

    def __init__(self, body: bytes, text: bytes, members: tuple[_Member, ...]) -> None:
        self.body = body
        # The body in UTF-8.
        self._text = text
        self._members = members
        self.names = frozenset(member.name for member in members)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Split a body in any encoding that JSON parsers of engines accept. Raises UnreadableBody."""
        scanned = body
        encoding = json.detect_encoding(body)
        if encoding != "utf-8":
            # FastAPI reads bodies with ``json.loads``, which accepts UTF-16 and UTF-32.
            try:
                scanned = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise UnreadableBody(f"the body is not {encoding}") from error
        return cls(body, scanned, _Scan(scanned).members())

    def raw(self, name: str) -> bytes | None:
        """Return the JSON text of a member's value, None without the member. The last one of equal names counts."""
        found = next((member for member in reversed(self._members) if member.name == name), None)
        return None if found is None else self._text[found.value_at : found.end]

    def value(self, name: str) -> object:
        """Return a member's value, None without the member or if its value is not JSON."""
        raw = self.raw(name)
        try:
            return None if raw is None else json.loads(raw)
        except (ValueError, RecursionError):
            return None

    def edited(self, *, remove: Collection[str] = (), replace: Mapping[str, bytes] | None = None) -> bytes:
        """Return the body without the members ``remove``, and with the values ``replace``, which are JSON texts.

        A replaced member keeps its place; a new one is the last. Without a change, the body is returned as it is.
        """
        left = dict(replace or {})
        if not left and self.names.isdisjoint(remove):
            return self.body
        replaced = frozenset(left)
        parts = []
        for member in self._members:
            if member.name in remove or (member.name in replaced and member.name not in left):
                continue
            if member.name in left:
                parts.append(self._text[member.at : member.value_at] + left.pop(member.name))
            else:
                parts.append(self._text[member.at : member.end])
        parts += [json.dumps(name).encode() + b":" + value for name, value in left.items()]
        return b"{" + b",".join(parts) + b"}"


class _Scan:
    """A scan of one object, from the first byte to the last."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._elements = 0

    def members(self) -> tuple[_Member, ...]:
        found: list[_Member] = []
        self._expect(b"{")
        if self._next() == b"}":
            self._at += 1
        else:
            while True:
                found.append(self._member())
                ending = self._next()
                self._at += 1
                if ending == b"}":
                    break
                if ending != b",":
                    raise self._wrong()
        if self._next():
            raise self._wrong()
        return tuple(found)

    def _member(self) -> _Member:
        self._count()
        self._next()
        key = _STRING.match(self._text, self._at)
        if key is None:
            raise self._wrong()
        try:
            name = json.loads(key[0])
        except ValueError as error:
            raise self._wrong() from error
        self._at = key.end()
        self._expect(b":")
        first = self._next()
        start = self._at
        if first in _OPENING:
            self._skip_container()
        else:
            value = (_STRING if first == b'"' else _SCALAR).match(self._text, start)
            if value is None:
                raise self._wrong()
            self._at = value.end()
        return _Member(name, key.start(), start, self._at)

    def _skip_container(self) -> None:
        depth = 0
        for token in _STRUCTURE.finditer(self._text, self._at):
            self._count()
            mark = token[0]
            if mark in _OPENING:
                depth += 1
            elif mark in _CLOSING:
                depth -= 1
                if not depth:
                    self._at = token.end()
                    return
            elif mark == b'"':
                break
        raise self._wrong()

    def _next(self) -> bytes:
        """Skip white space; return the next byte, empty at the end."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._text[self._at : self._at + 1]

    def _expect(self, mark: bytes) -> None:
        if self._next() != mark:
            raise self._wrong()
        self._at += 1

    def _count(self) -> None:
        self._elements += 1
        if self._elements > ELEMENTS_MAX:
            raise UnreadableBody(f"the body has more than {ELEMENTS_MAX} JSON elements", too_large=True)

    def _wrong(self) -> UnreadableBody:
        return UnreadableBody(f"the body is not a JSON object: unexpected byte at {self._at}")
