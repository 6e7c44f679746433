"""Tests that the transport benchmark compares equal work: both servers send the same messages."""

import importlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dualmap_extproc.transport.http2.frames import DATA, HEADER, HEADER_BYTES

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="transport")
def _transport(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.transport")


def sent(output: bytes) -> dict[int, bytes]:
    """Return the bytes of the messages on each stream."""
    messages: dict[int, bytes] = defaultdict(bytes)
    while output:
        word, _, stream_id = HEADER.unpack_from(output)
        end = HEADER_BYTES + (word >> 8)
        if word & 0xFF == DATA:
            messages[stream_id] += output[HEADER_BYTES:end]
        output = output[end:]
    return messages


def test_transport_benchmark_servers_send_the_same_messages(transport: ModuleType) -> None:
    for kind in transport.KINDS:
        few = replace(kind, calls=6)
        outputs = []
        for server in transport.SERVERS.values():
            read = server(few)
            read(transport.beginning())
            outputs.append(sent(b"".join(map(read, transport.reads(few)))))
        assert outputs[0] == outputs[1]
        assert list(outputs[0]) == [1, 3, 5, 7, 9, 11]
