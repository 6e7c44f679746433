"""The errors of recordings.

::

    RecordingError         the command ends; ``str()`` says what is wrong and what is accepted
    ├── NotARecording      a path has no file of a recording that this program reads
    ├── DifferentKeys      files to merge have hashes of different keys
    └── CannotImport       a file of another format cannot be converted
"""


class RecordingError(Exception):
    """A recording cannot be read, written or converted."""


class NotARecording(RecordingError):
    """A path has no file of a recording that this program reads."""


class DifferentKeys(RecordingError):
    """The files to merge have hashes of different keys, which cannot be compared."""


class CannotImport(RecordingError):
    """A file of another format cannot be converted to a recording."""
