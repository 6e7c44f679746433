"""Edits of JSON bodies as bytes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_sidecar import json_object
from dualmap_sidecar.errors import UnreadableBody
from dualmap_sidecar.json_object import JsonObject

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_members_of_any_object_are_those_of_a_parser(document: dict[str, Any], ascii_only: bool, indent: Any) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    members = JsonObject.parse(body)
    assert members.names == set(document)
    assert {name: members.value(name) for name in members.names} == json.loads(body)


@given(st.dictionaries(st.text(), VALUES, max_size=6), VALUES)
def test_edit_changes_only_the_named_members(document: dict[str, Any], value: Any) -> None:
    body = json.dumps({**document, "drop": value}).encode()
    edited = JsonObject.parse(body).edited(remove=["drop"], replace={"new": json.dumps(value).encode()})
    expected = {name: each for name, each in document.items() if name not in ("drop", "new")} | {"new": value}
    assert json.loads(edited) == expected


def test_other_members_stay_identical_in_every_byte() -> None:
    kept = [b'"temperature": 0.10', b'"seed":123456789012345678901234567890', b'"prompt"  :"\\u00e9\\/ \xc3\xa9"']
    body = b'{ "stream": true , ' + b" , ".join(kept) + b', "stream_options": {"include_usage": true} }'
    edited = JsonObject.parse(body).edited(remove=["stream_options"], replace={"stream": b"false"})
    assert edited == b'{"stream": false,' + b",".join(kept) + b"}"


def test_body_without_a_change_is_returned_as_it_is() -> None:
    body = b' {"prompt" : "x"} \n'
    assert JsonObject.parse(body).edited(remove=["kv_transfer_params"]) == body


@pytest.mark.parametrize(
    "name", [b'"kv_transfer_params"', b'"kv\\u005ftransfer_params"', b'"\\u006bv_transfer\\u005Fparams"']
)
def test_removed_member_is_found_in_every_spelling_and_number(name: bytes) -> None:
    body = b"{" + name + b':{"a":1},"prompt":"x",' + name + b":2}"
    assert JsonObject.parse(body).edited(remove=["kv_transfer_params"]) == b'{"prompt":"x"}'


def test_replaced_member_that_is_repeated_has_one_value() -> None:
    body = b'{"stream":true,"prompt":"x","stream":true}'
    assert JsonObject.parse(body).edited(replace={"stream": b"false"}) == b'{"stream":false,"prompt":"x"}'


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_body_in_another_encoding_of_json_is_edited(encoding: str) -> None:
    body = '{"prompt": "é", "kv_transfer_params": {}}'.encode(encoding)
    assert json.loads(body) == {"prompt": "é", "kv_transfer_params": {}}
    assert json.loads(JsonObject.parse(body).edited(remove=["kv_transfer_params"])) == {"prompt": "é"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'"a"', b"{", b'{"a"}', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a":1}x', b"{'a':1}", b'{"a":"b}',
        b'{"a":[1}', b'{"a":["]}', b'{"a":1 "b":2}', b'{"\\x":1}', b"\xff\xfe{", b'{"a":\x00}x',
    ],
)  # fmt: skip
def test_body_that_is_no_object_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableBody):
        JsonObject.parse(body)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_unreadable(body: bytes) -> None:
    try:
        edited = JsonObject.parse(body).edited(remove=["a"])
    except UnreadableBody:
        return
    assert edited


@given(st.lists(st.sampled_from([*b'{}[],:"', b'"a"', b"1", b'"\\"'])))
def test_no_edit_leaves_a_removed_name_in_a_readable_body(pieces: list[int | bytes]) -> None:
    body = b"".join(bytes([each]) if isinstance(each, int) else each for each in pieces)
    try:
        edited = JsonObject.parse(b'{"a":1,' + body).edited(remove=["a"])
        document = json.loads(edited)
    except (UnreadableBody, ValueError):
        return
    assert "a" not in document


def test_deep_nesting_is_scanned_without_recursion() -> None:
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"b":1}'
    document = JsonObject.parse(body)
    assert document.names == {"a", "b"}
    assert document.value("a") is None


def test_body_with_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_object, "ELEMENTS_MAX", 10)
    JsonObject.parse(b'{"a":[[],[]]}')
    with pytest.raises(UnreadableBody) as refused:
        JsonObject.parse(b'{"a":[[],[],[],[],[],[]]}')
    assert refused.value.too_large
