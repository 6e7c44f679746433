"""Converts conversations into canonical text: turns, the content of turns, and tools.

Each turn begins with a control character and its role. Control characters in the text are doubled, so that different
conversations never have the same canonical text. Template settings and media are replaced by a digest: they change the
key, and add a few tokens regardless of their size.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

RECORD: Final = "\x1e"
UNIT: Final = "\x1f"
# The fields of a content part with text, and the fields with an image, audio, video or file.
_TEXT_FIELDS: Final = ("text", "refusal", "thinking")
_MEDIA_FIELDS: Final = (
    *("image_url", "input_audio", "audio_url", "video_url", "image", "file", "file_id", "file_data", "source"),
)
# The content field of each known part type; engines ignore the other fields of such a part.
_FIELD_OF_TYPE: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "image_url": "image_url",
    "input_image": "image_url",
    "input_audio": "input_audio",
    "audio_url": "audio_url",
    "video_url": "video_url",
}
# The beginning of a system block that Claude Code sends with a hash of the request; vLLM removes this block.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
# A shared encoder: json.dumps with these options would create an encoder for every call.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

Shape: TypeAlias = Mapping[str, "Shape | None"]
"""The keys that engines read in an object, with the shape of each key's value; None accepts any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The settings for reading the turns of one API.

    ``fields`` are the relevant fields of a turn in addition to role and content. If a field has a shape, only the keys
    of the shape are relevant. ``of_role`` replaces ``fields`` for turns of some roles. With ``exact``, only the content
    field of a part with a known type is relevant. With ``blocks``, a part may be one of Anthropic's tool_use,
    tool_result or redacted_thinking blocks.
    """

    fields: Shape
    of_role: Mapping[str, Shape] = field(default_factory=dict)
    exact: bool = True
    blocks: bool = False

    def turns(self, turns: object) -> Iterator[str]:
        """Yield a conversation: a list of turns, or the content of a single turn."""
        if isinstance(turns, list):
            for turn in turns:
                yield from self._turn(turn)
        elif turns is not None:
            yield RECORD
            yield from self.content(turns)

    def system(self, content: object) -> Iterator[str]:
        """Yield system instructions outside the turns."""
        if isinstance(content, list):
            content = [block for block in content if not _is_billing_header(block)]
        if content:
            yield f"{RECORD}system{UNIT}"
            yield from self.content(content)

    def content(self, content: object) -> Iterator[str]:
        """Yield the content of a turn: a text, or a list of text and media parts."""
        if content is None:
            return
        if isinstance(content, list):
            for part in content:
                yield from self._block(part) if self.blocks else self._part(part)
        else:
            yield spelled(content)

    def _turn(self, turn: object) -> Iterator[str]:
        """Yield one message, or one item of a Responses API input (which may be a tool call or its output)."""
        if not isinstance(turn, dict):
            yield RECORD
            yield from self.content(turn)
            return
        role = turn.get("role") or turn.get("type")
        yield f"{RECORD}{spelled(role)}{UNIT}"
        yield from self.content(turn.get("content"))
        if len(turn) == 2 and "role" in turn and "content" in turn:
            # Nearly all turns have only role and content. The search for other fields would take a fifth of the time
            # for a long conversation.
            return
        fields = self.of_role.get(role, self.fields) if isinstance(role, str) else self.fields
        for name, shape in fields.items():
            value = turn.get(name)
            if value:
                yield f"{UNIT}{name}{UNIT}{spelled(value if shape is None else _shaped(value, shape))}"

    def _block(self, block: object) -> Iterator[str]:
        """Yield one of Anthropic's content blocks."""
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind not in ("tool_use", "tool_result", "redacted_thinking"):
            yield from self._part(block)
        elif kind == "tool_use":
            yield f"{UNIT}tool_use"
            yield from (f"{UNIT}{spelled(block.get(name))}" for name in ("id", "name", "input"))
        elif kind == "tool_result":
            yield f"{UNIT}tool_result{UNIT}{spelled(block.get('tool_use_id'))}"
            result = block.get("content")
            # A result contains text and images; engines read no tool blocks in a result.
            for part in result if isinstance(result, list) else [result or ""]:
                yield from self._part(part)
        # Engines skip redacted thinking, which they cannot read.

    def _part(self, part: object) -> Iterator[str]:
        if not isinstance(part, dict):
            yield f"{UNIT}{spelled(part)}"
            return
        kind = part.get("type")
        only = _FIELD_OF_TYPE.get(kind) if self.exact and isinstance(kind, str) else None
        if only in _TEXT_FIELDS and isinstance(part.get(only), str):
            # Nearly all content parts are plain text.
            yield spelled(part[only])
            return
        texts = [part[name] for name in _TEXT_FIELDS if only in (None, name) and isinstance(part.get(name), str)]
        media = [name for name in _MEDIA_FIELDS if only in (None, name) and part.get(name)]
        yield from map(spelled, texts)
        for name in media:
            # The data of an image may be megabytes and would make the token estimate far too large.
            yield f"{UNIT}{name}{UNIT}{digest(part[name])}"
        if not texts and not media:
            yield f"{UNIT}{digest(part) if self.exact else compact(part)}"


def as_json(value: object, shape: Shape | None) -> str:
    """Return tools as JSON with only the keys of ``shape``, as in the engine's schema; None keeps all keys."""
    return compact(value if shape is None else _shaped(value, shape))


def digest(value: object) -> str:
    """Return a fixed-size hash of a value; for media, the hash of the URL or data (``{"url": ...}`` or a text)."""
    reference = value.get("url", value) if isinstance(value, dict) else value
    text = reference if isinstance(reference, str) else compact(reference)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def spelled(value: object) -> str:
    """Return a text with doubled control characters, or any other value as compact JSON."""
    if not isinstance(value, str):
        return compact(value)
    if RECORD in value or UNIT in value:
        return value.replace(RECORD, 2 * RECORD).replace(UNIT, 2 * UNIT)
    return value


def compact(value: object) -> str:
    """Return JSON without spaces; keys keep their order, because chat templates render them in this order."""
    return "" if value is None else _ENCODER.encode(value)


def _shaped(value: object, shape: Shape) -> object:
    if isinstance(value, list):
        return [_shaped(item, shape) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if (inner := shape[key]) is None else _shaped(item, inner)
        for key, item in value.items()
        if key in shape
    }


def _is_billing_header(block: object) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING_HEADER)
