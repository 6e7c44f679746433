"""Fuzzes the parsing of Envoy's access log. Any client that reaches the port can send these bytes."""

from contextlib import suppress
from typing import Final

from google.protobuf.message import DecodeError

from dualmap_extproc import names
from dualmap_extproc.envoy.access_log.entry import read_entry, read_id
from dualmap_extproc.request.ending import AccessLogEntry, Ending
from dualmap_extproc.wire import access_log_pb2 as wire
from fuzz.choices import Choices

_FLAGS: Final = frozenset(wire.ResponseFlags.DESCRIPTOR.fields_by_name)
_TAGS: Final = (
    *(names.TAG_REQUEST_ID, names.TAG_PROMPT_TOKENS, names.TAG_COMPLETION_TOKENS, names.TAG_CACHED_TOKENS, "other"),
)
_NUMBERS: Final = (
    "-",
    "0",
    "12",
    "1e+06",
    "1e309",
    "nan",
    "-1",
    "1000000001",
    "0x10",
    "1_0",
    " 7 ",
    "\N{SUPERSCRIPT TWO}",
)
_HOSTS: Final = ("10.0.0.1", "::1", "", "unix", "10.0.0.1:8000")
_TOKENS_MAX: Final = 10**9


def check(data: bytes) -> None:
    """Check that any entries are read without an error, and that the values are within bounds.

    The input is used twice: as an encoded batch, and as choices that build entries.
    """
    entries = [_entry(Choices(data))]
    with suppress(DecodeError):
        entries.extend(wire.StreamAccessLogsMessage.FromString(data).http_logs.log_entry)
    for entry in entries:
        request_id = read_id(entry)
        read = read_entry(entry, request_id)
        assert (request_id, read) == (read_id(entry), read_entry(entry, request_id))
        if request_id:
            _check_entry(read)


def _check_entry(entry: AccessLogEntry) -> None:
    assert entry.request_id
    assert entry.status is None or 0 <= entry.status < 2**32
    assert _FLAGS.issuperset(entry.flags)
    assert entry.ending in Ending
    if entry.served_endpoint is not None:
        host, _, port = entry.served_endpoint.rpartition(":")
        assert host
        assert 0 < int(port) < 2**16
    if entry.usage is not None:
        counts = (entry.usage.prompt_tokens, entry.usage.completion_tokens, entry.usage.cached_tokens)
        assert any(count is not None for count in counts)
        assert all(count is None or 0 <= count <= _TOKENS_MAX for count in counts)


def _entry(choices: Choices) -> wire.HTTPAccessLogEntry:
    """Build an entry from choices. Each relevant field may be present or absent."""
    entry = wire.HTTPAccessLogEntry()
    common = entry.common_properties
    while choices.more:
        match choices.number() % 6:
            case 0:
                common.custom_tags[choices.pick(_TAGS)] = choices.pick(_NUMBERS)
            case 1:
                common.custom_tags[choices.pick(_TAGS)] = choices.text()
            case 2:
                entry.response.response_code.value = choices.number(size=4)
            case 3:
                setattr(common.response_flags, choices.pick(sorted(_FLAGS)), choices.flag())
            case 4:
                address = common.upstream_remote_address.socket_address
                address.address = choices.pick(_HOSTS)
                address.port_value = choices.number(size=3)
            case 5:
                fields = common.metadata.filter_metadata[choices.pick((names.DUALMAP_NAMESPACE, "other"))].fields
                fields[choices.pick((names.REQUEST_ID_KEY, "other"))].string_value = choices.text()
    return entry
