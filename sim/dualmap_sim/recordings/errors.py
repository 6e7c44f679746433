"""The errors of recordings.

::

    RecordingError         the command ends; ``str()`` says what is wrong and what is accepted
    ├── NotARecording      a path has no file of a recording that this program reads
    ├── DifferentKeys      files to merge have hashes of different keys
    ├── CannotImport       a file of another format cannot be converted
    └── UnusableLine       a line of such a file cannot be converted; the other lines can
"""

_SHOWN_CHARACTERS = 60


class RecordingError(Exception):
    """A recording cannot be read, written or converted."""


class NotARecording(RecordingError):
    """A path has no file of a recording that this program reads."""


class DifferentKeys(RecordingError):
    """The files to merge have hashes of different keys, which cannot be compared."""


class CannotImport(RecordingError):
    """A file of another format cannot be converted to a recording."""


class UnusableLine(RecordingError):
    """A field of a line of another format is missing or not accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        text = "nothing" if value is None else repr(value)
        shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
        super().__init__(f"{field}: {shown} is not accepted; give {accepted}")
