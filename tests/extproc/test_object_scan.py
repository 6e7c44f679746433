"""Tests of the scan for the end of a JSON object: its results for whole bodies, and for bodies in chunks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_extproc.request.body import ReceivedBody, may_go_on
from dualmap_extproc.request.object_scan import MARKS_MAX, ObjectScan, ObjectState

values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('ab"\\{}[]\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\{}')), inner),
)


def state_after(*chunks: bytes) -> ObjectState:
    scan = ObjectScan()
    for chunk in chunks:
        scan.scan(chunk)
    return scan.state


@pytest.mark.parametrize(
    ("body", "is_incomplete"),
    [
        (b'{"a": "x"}', False),
        (b'{"a": "x"} \n', False),
        (b'{"a": {"b": 1}', True),
        (b'{"a": "x}', True),
        (b'{"a": "x", ', True),
        (b'{"a": "} {{"}', False),
        (b'{"a": "\\"}', True),
        (b'{"a": "\\\\"}', False),
    ],
)
def test_body_is_open_within_an_object_or_a_string(body, is_incomplete):
    assert (state_after(body) is ObjectState.OPEN) == is_incomplete
    assert may_go_on(body) == is_incomplete


@given(fields=st.dictionaries(st.text(), values), size=st.integers(1, 9), ascii_only=st.booleans())
def test_object_in_chunks_is_closed_by_its_last_byte(fields, size, ascii_only):
    body = b" \n" + json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "replace")
    chunks = [body[start : start + size] for start in range(0, len(body), size)]

    assert state_after(*chunks) is state_after(body) is ObjectState.CLOSED
    assert state_after(body[:-1]) is state_after(*chunks[:-1], chunks[-1][:-1])
    assert state_after(body[:-1]) is not ObjectState.CLOSED


@pytest.mark.parametrize("body", [b"not json", b"[1,2]", b"nope}", b'"text"', b"5", b"}", b"\x1f\x8b\x08"])
def test_body_that_begins_no_object_is_no_object(body):
    assert state_after(b" ", body) is ObjectState.NO_OBJECT


def test_blank_body_is_blank():
    assert state_after(b"", b" \r\n\t") is ObjectState.BLANK


def test_object_with_too_many_marks_is_unknown():
    assert state_after(b'{"a":', b'""' * (MARKS_MAX // 2), b"}") is ObjectState.UNKNOWN


def test_body_is_not_parsed_again_before_it_has_doubled(monkeypatch):
    parsed = []
    monkeypatch.setattr("dualmap_extproc.request.body.may_go_on", lambda body: parsed.append(len(body)) or True)
    body = ReceivedBody()
    for _ in range(100):
        body.add(b"{")
        body.scan(b"{", 0)
        assert body.may_continue(0)

    assert parsed == [1, 2, 4, 8, 16, 32, 64]
