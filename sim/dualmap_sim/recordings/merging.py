"""Merges recordings into one file, in order of time."""

from collections.abc import Iterator

from dualmap.recordings.lines import encode_line
from dualmap.recordings.values import Header
from dualmap_sim.recordings.errors import DifferentKeys
from dualmap_sim.recordings.reader import NAMES, Reading


def merged_lines(reading: Reading, *, separate_keys: bool, program: str) -> Iterator[str]:
    """Yield the lines of the merged file: its first line, and all sound lines as they are.

    The first line has the smallest share of sessions of the files. Raises DifferentKeys if the hashes have several keys
    and ``separate_keys`` is false.
    """
    if len(reading.keys) > 1 and not separate_keys:
        first = reading.sources[0]
        other = next(source for source in reading.sources if source.keys != first.keys)
        raise DifferentKeys(
            f"{first.file} and {other.file} have hashes of different keys, so equal prompts have different hashes; "
            "give recordings with the same key, or --separate-keys to merge them without common prefixes and sessions"
        )
    return _lines(reading, program)


def _lines(reading: Reading, program: str) -> Iterator[str]:
    yield encode_line(
        Header(
            router=NAMES.join(reading.routers),
            started_s=min(source.header.started_s for source in reading.sources),
            key=NAMES.join(sorted(reading.keys)),
            sample=reading.samples[0],
            program=program,
        )
    )
    for text, _ in reading.lines():
        yield text.decode() + "\n"
