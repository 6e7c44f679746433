"""The lines of a recording: every value returns from its line, and damage gets an error that names it."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.recordings.recorded_values import HEADER, LINES, REQUEST
from dualmap.prompts.blocks import MAX_BLOCKS
from dualmap.recordings.errors import CutOffLine, DamagedLine, ForeignVersion, InvalidField, InvalidLine
from dualmap.recordings.lines import decode_line, encode_line, line_fields
from dualmap.recordings.values import Line, RecordedRequest

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def _edited(line: Line, **changes: object) -> str:
    return json.dumps({**line_fields(line), **changes})


@given(LINES)
def test_line_of_any_value_decodes_to_the_value(line: Line) -> None:
    encoded = encode_line(line)

    assert encoded.count("\n") == 1
    assert encoded.isascii()
    assert decode_line(encoded) == line


@given(LINES, st.data())
def test_line_cut_off_anywhere_is_named_so(line: Line, data: st.DataObject) -> None:
    encoded = encode_line(line).rstrip("\n")
    length = data.draw(st.integers(1, len(encoded) - 1))

    # A cut behind an inner object's end looks like a complete line that is wrong.
    with pytest.raises(CutOffLine if encoded[length - 1] != "}" else InvalidLine):
        decode_line(encoded[:length])


@given(LINES, st.data())
def test_line_with_any_edited_field_decodes_or_names_damage(line: Line, data: st.DataObject) -> None:
    fields = line_fields(line)
    name = data.draw(st.sampled_from(sorted(fields)))
    edited = json.dumps({**fields, name: data.draw(_JSON)})

    try:
        decoded = decode_line(edited)
    except DamagedLine:
        return
    assert decode_line(encode_line(decoded)) == decoded


@given(st.text())
def test_line_of_any_text_is_damaged_or_a_value(text: str) -> None:
    with pytest.raises(DamagedLine):
        decode_line(text)


def test_line_with_unknown_fields_ignores_them() -> None:
    assert decode_line(_edited(REQUEST, colour="blue", receipt_of=[1])) == REQUEST


def test_request_line_leaves_out_fields_with_defaults() -> None:
    fields = line_fields(REQUEST)

    assert "adapter" not in fields
    assert "cached_tokens" not in fields
    assert fields["session"] == "0000000000000007"
    assert fields["blocks"] == "00000000000000010000000000000002ffffffffffffffff"


def test_request_chain_has_the_keyed_hashes() -> None:
    chain = REQUEST.chain

    assert chain.hashes == REQUEST.blocks
    assert chain.cacheable == (1, 2)


@pytest.mark.parametrize(
    ("usage", "receipt", "known"), [(290, True, 290), (None, True, 310), (None, False, 300)], ids=str
)
def test_known_prompt_tokens_prefer_the_engines(usage: int | None, receipt: bool, known: int) -> None:
    assert REQUEST.receipt is not None
    decided = REQUEST.receipt._replace(prompt_tokens=310) if receipt else None
    request: RecordedRequest = REQUEST._replace(engine_prompt_tokens=usage, receipt=decided)

    assert request.known_prompt_tokens == known


def test_header_of_another_version_is_foreign() -> None:
    with pytest.raises(ForeignVersion, match="version 2 of the format; this program reads version 1"):
        decode_line(_edited(HEADER, version=2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"prompt_tokens": -1},
            "prompt_tokens: -1 is not accepted; the format has a whole number from 0 to 1000",
        ),
        ({"prompt_tokens": "300"}, "prompt_tokens: '300' is not"),
        ({"prompt_tokens": True}, "prompt_tokens: True is not"),
        ({"prompt_tokens": None}, "prompt_tokens: nothing is not"),
        ({"arrived_s": 1e300}, "arrived_s: 1e\\+300 is not"),
        ({"block_tokens": 0}, "block_tokens: 0 is not"),
        ({"blocks": "12"}, "blocks: '12' is not accepted; the format has hashes of 16 hex digits each"),
        ({"blocks": "0000 0000 000 01"}, "blocks: '0000 0000 000 01' is not"),
        ({"blocks": "0" * 16 * 16_385}, "the format has at most 16384 hashes"),
        ({"prompt_tokens": 385}, "prompt_tokens: 385 is not accepted; the format has 257 to 384 for 3 blocks of 128"),
        ({"prompt_tokens": 256}, "prompt_tokens: 256 is not accepted; the format has 257 to 384 for 3 blocks of 128"),
        ({"blocks": ""}, "prompt_tokens: 300 is not accepted; the format has 0 to 0 for 0 blocks"),
        ({"full_blocks": 4}, "full_blocks: 4 is not accepted; the format has 2 to 3 for 3 blocks"),
        ({"full_blocks": 1}, "full_blocks: 1 is not accepted; the format has 2 to 3 for 3 blocks"),
        ({"session": "0" * 32}, "session: .* the format has a hash of 16 hex digits"),
        ({"outcome": "fine"}, "outcome: 'fine' is not accepted; the format has one of ok, engine_error, client_gone"),
        ({"receipt": []}, "receipt: .* a JSON object"),
        ({"receipt": {"policy": ""}}, "receipt.policy: '' is not accepted; the format has a text that is not empty"),
        (
            {"engine_prompt_tokens": 300, "cached_tokens": 301},
            "cached_tokens: 301 is not accepted; the format has at most engine_prompt_tokens, 300",
        ),
        ({"streamed": 1}, "streamed: 1 is not accepted; the format has true or false"),
    ],
    ids=str,
)
def test_request_line_with_wrong_value_names_field(changes: Mapping[str, object], said: str) -> None:
    with pytest.raises(InvalidField, match=said):
        decode_line(_edited(REQUEST, **changes))


def test_prompt_with_more_blocks_than_are_hashed_is_sound() -> None:
    request = REQUEST._replace(blocks=(7,) * MAX_BLOCKS, prompt_tokens=10**8)
    assert decode_line(encode_line(request)) == request
    told = request._replace(full_blocks=MAX_BLOCKS + 5)
    assert decode_line(encode_line(told)) == told


@pytest.mark.parametrize("sample", [0, 1.5, -0.1, "all"])
def test_header_with_impossible_share_is_damaged(sample: object) -> None:
    with pytest.raises(InvalidField, match="sample"):
        decode_line(_edited(HEADER, sample=sample))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[]", "no JSON object"),
        ('{"kind": "bodies"}', "no kind of recording, request, pool, pool_removed, missing"),
        ('{"kind": ["request"]}', "no kind"),
        ('{"arrived_s": NaN}', "no JSON: NaN is no number of JSON"),
        ('{"arrived_s": -Infinity}', "no JSON: -Infinity is no number of JSON"),
        ("[" * 100_000, "no JSON"),
        (f'{{"a": {"9" * 10_000}}}', "no JSON: a number is too long"),
    ],
    ids=lambda text: text[:20],
)
def test_line_that_is_no_line_of_a_recording_is_invalid(text: str, said: str) -> None:
    with pytest.raises(InvalidLine, match=said):
        decode_line(text)
