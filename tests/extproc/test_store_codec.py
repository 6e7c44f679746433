import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import PeerShares, Report, Share
from dualmap_extproc.store.codec import (
    NODES_MAX,
    UnreadableUpdate,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
)

HASHES = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, 2**63)
SECONDS = st.floats(0, 1e9)
NAMES = st.text(st.characters(codec="utf-8"), max_size=40)
LOADS = st.builds(
    SharedLoad,
    pending_prefill_tokens=TOKENS,
    backlog_s=SECONDS,
    held_s=SECONDS,
    in_flight=COUNTS,
    active_kv_tokens=TOKENS,
)
BINDINGS = st.builds(SharedBinding, session=HASHES, host=NAMES, tokens=TOKENS, version=COUNTS, moved_ago_s=SECONDS)
NEWS = st.builds(
    ReplicaUpdate,
    hotness=st.builds(HotnessCounts, requests=COUNTS, nodes=st.dictionaries(HASHES, COUNTS.filter(bool), max_size=20)),
    loads=st.dictionaries(NAMES, LOADS, max_size=5),
    placements=st.lists(
        st.builds(Placement, endpoint=NAMES, hashes=st.lists(HASHES, max_size=20).map(tuple)), max_size=5
    ).map(tuple),
    bindings=st.lists(BINDINGS, max_size=5).map(tuple),
)
SHARES = st.builds(
    Share,
    desired_replicas=st.floats(0, 1e6),
    pending_prefill_tokens=st.integers(0, 2**48),
    in_flight=COUNTS,
    held=COUNTS,
    first_tokens=COUNTS,
    slo_met=st.just(0),
)
REPORTS = st.builds(Report, own=SHARES, pool=SHARES)
EMPTY = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={})


@given(NEWS)
def test_replication_update_round_trip_is_equal(update: ReplicaUpdate) -> None:
    assert decode_update(encode_update(update)) == update


@given(NEWS, st.data())
def test_truncated_replication_update_is_rejected(update: ReplicaUpdate, data: st.DataObject) -> None:
    encoded = encode_update(update)
    with pytest.raises(UnreadableUpdate):
        decode_update(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(NEWS, st.data())
def test_update_with_a_changed_byte_differs_or_is_rejected(update: ReplicaUpdate, data: st.DataObject) -> None:
    encoded = bytearray(encode_update(update))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_update(bytes(encoded))
    except UnreadableUpdate:
        return
    assert all(0 <= load.backlog_s < float("inf") for load in decoded.loads.values())
    decode_update(encode_update(decoded))


def test_update_largest_version_can_be_encoded() -> None:
    binding = SharedBinding(session=1, host="a", tokens=10, version=2**32, moved_ago_s=0.0)
    update = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={}, bindings=(binding,))
    assert decode_update(encode_update(update)).bindings[0].version == 2**32 - 1


@given(st.binary(max_size=200))
def test_update_of_random_bytes_is_rejected(junk: bytes) -> None:
    with pytest.raises(UnreadableUpdate):
        decode_update(b"\x02" + junk)
    try:
        decode_update(b"\x01" + junk)
    except UnreadableUpdate:
        return


def test_update_with_a_count_beyond_the_data_is_rejected() -> None:
    with pytest.raises(UnreadableUpdate, match="4294967295 values do not fit in 8 bytes"):
        decode_update(struct.pack("<BII", 1, 0, 2**32 - 1) + bytes(8))


def test_update_with_extra_bytes_is_rejected() -> None:
    with pytest.raises(UnreadableUpdate, match="1 unexpected bytes at the end"):
        decode_update(encode_update(EMPTY) + b"\0")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_update_with_invalid_times_is_rejected(seconds: float) -> None:
    loads = {"m": SharedLoad(backlog_s=12345.0)}
    encoded = encode_update(ReplicaUpdate(hotness=EMPTY.hotness, loads=loads))
    with pytest.raises(UnreadableUpdate, match="seconds"):
        decode_update(encoded.replace(struct.pack("<d", 12345.0), struct.pack("<d", seconds)))


def test_update_of_8000_tokens_has_about_500_bytes() -> None:
    placement = Placement(endpoint="10.0.0.1:8000", hashes=tuple(range(64)))
    empty, one = (
        len(encode_update(ReplicaUpdate(hotness=EMPTY.hotness, loads={}, placements=p))) for p in ((), (placement,))
    )
    assert one - empty < 64 * 8 + 32


MANY = dict.fromkeys(range(NODES_MAX + 1), 1)


@pytest.mark.parametrize("nodes", [{7: 0}, {7: 1, 8: 0}, MANY], ids=["none", "some", "too many"])
def test_update_with_invalid_counts_is_rejected(nodes):
    with pytest.raises(UnreadableUpdate):
        decode_update(encode_update(ReplicaUpdate(hotness=HotnessCounts(requests=1, nodes=nodes))))


def test_update_without_loads_is_decoded_without_loads():
    assert decode_update(encode_update(replace(EMPTY, loads=None))) == EMPTY


@given(REPORTS, st.binary(max_size=20))
def test_demand_report_round_trip_ignores_unknown_later_fields(report: Report, added: bytes) -> None:
    encoded = encode_report(report)
    assert len(encoded) == 65
    assert decode_report(encoded) == report
    assert decode_report(encoded + added) == report


@given(REPORTS, st.integers(0, 64))
def test_truncated_demand_report_is_rejected(report: Report, size: int) -> None:
    with pytest.raises(UnreadableUpdate, match="invalid report of"):
        decode_report(encode_report(report)[:size])


@pytest.mark.parametrize("replicas", [float("nan"), float("inf"), -1.0, 1e7])
def test_report_with_invalid_replicas_is_rejected(replicas: float) -> None:
    encoded = encode_report(Report(own=Share(desired_replicas=12345.0), pool=Share()))
    with pytest.raises(UnreadableUpdate, match="instances"):
        decode_report(encoded.replace(struct.pack("<d", 12345.0), struct.pack("<d", replicas)))


def test_report_with_more_slo_met_than_first_tokens_is_rejected() -> None:
    with pytest.raises(UnreadableUpdate, match="5 of 4 first tokens in time"):
        decode_report(encode_report(Report(own=Share(first_tokens=4, slo_met=5), pool=Share())))


def test_report_of_another_version_is_rejected() -> None:
    with pytest.raises(UnreadableUpdate):
        decode_report(b"\x02" + encode_report(Report(own=Share(), pool=Share()))[1:])


def test_report_with_excessive_demand_is_bounded() -> None:
    endless = Share(desired_replicas=1e12)
    assert decode_report(encode_report(Report(own=endless, pool=endless))).own.desired_replicas == 1e6


def test_report_sum_of_any_values_can_be_encoded() -> None:
    """A router adds the largest decodable shares of other routers and sends the sum, which must be encodable."""
    most = Share(pending_prefill_tokens=2**48, in_flight=2**32 - 1, held=2**32 - 1, first_tokens=2**32 - 1)
    peers = PeerShares()
    for peer in "ab":
        peers.add_report(0.0, peer, decode_report(encode_report(Report(own=most, pool=most))))
    told = decode_report(encode_report(Report(own=Share(), pool=peers.live(0.0, Share()))))
    assert told.pool == most


def test_report_with_more_tokens_than_keda_accepts_is_rejected() -> None:
    encoded = encode_report(Report(own=Share(pending_prefill_tokens=12345), pool=Share()))
    with pytest.raises(UnreadableUpdate, match="tokens"):
        decode_report(encoded.replace(struct.pack("<Q", 12345), struct.pack("<Q", 2**48 + 1)))
