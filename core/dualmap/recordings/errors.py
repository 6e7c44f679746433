"""The errors of a line that is not a sound line of a recording.

::

    DamagedLine           the line is not used; ``str()`` says what is wrong with it
    ├── CutOffLine        the line ends before its JSON object does
    ├── InvalidLine       the line is no JSON object, or an object of no known kind
    ├── InvalidField      a field is missing, or has a value of a wrong type or outside its range
    └── ForeignVersion    the first line names a version of the format that this program does not read
"""

from dualmap.errors import DualMapError


class DamagedLine(DualMapError):
    """A line that is not a sound line of a recording."""


class CutOffLine(DamagedLine):
    """The line ends before its JSON object does."""

    def __init__(self) -> None:
        super().__init__("the line is cut off: its JSON object has no end")


class InvalidLine(DamagedLine):
    """The line is no JSON object, or an object of no known kind."""


class InvalidField(DamagedLine):
    """A field is missing, or its value is not accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        text = "nothing" if value is None else repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        super().__init__(f"{field}: {shown} is not accepted; the format has {accepted}")


class ForeignVersion(DamagedLine):
    """The first line names a version of the format that this program does not read."""

    def __init__(self, version: int, accepted: int) -> None:
        super().__init__(f"the recording has version {version} of the format; this program reads version {accepted}")
