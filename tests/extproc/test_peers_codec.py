"""Tests of the frames between routers: round trips of all messages, hostile frames, and frames of other releases."""

import contextlib
import math

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import Media, chain_tokens, pack_tokens
from dualmap.kv_store.view import HOLDERS_MAX, NO_MATCH, StoreMatch
from dualmap.ownership.messages import Answer, Ask, Declined, Left, Message, Progress, Sent, Step
from dualmap.prompts.blocks import MAX_BLOCKS, BlockChain
from dualmap.receipt import CandidateReceipt, Key, Receipt, SessionHost
from dualmap.requests import Decision, Queued, Reason, Rejection, Request, Usage
from dualmap_extproc.peers.codec import (
    ACCEPT,
    Frame,
    Hello,
    RouterState,
    UnreadableFrame,
    decode_frame,
    encode_entry,
    encode_hello,
    encode_message,
    encode_proof,
    encode_shared,
    encode_state,
)
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.wire import peers_pb2 as wire

HASHES = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
ENDPOINTS = st.builds("{}:{}".format, st.sampled_from(["10.0.0.1", "[fd00::1]"]), st.integers(1, 65535))
CHAINS = st.builds(
    BlockChain,
    hashes=st.lists(HASHES, max_size=20).map(tuple),
    block_tokens=st.integers(1, 2**20),
    tokens=TOKENS,
    exact=st.booleans(),
    full_blocks=st.none() | TOKENS,
)
STORED = st.just(NO_MATCH) | st.builds(
    StoreMatch,
    tokens=TOKENS.filter(bool),
    held_at=st.lists(st.tuples(NAMES, TOKENS), max_size=HOLDERS_MAX).map(tuple),
)
REQUESTS = st.builds(
    Request,
    id=NAMES,
    chain=CHAINS,
    arrived_s=st.just(0.0),
    subset=st.none() | st.frozensets(TEXTS, max_size=5),
    streamed=st.booleans(),
    session=st.none() | HASHES,
    client=HASHES,
    client_is_salt=st.booleans(),
    comparable=st.booleans(),
    sequences=st.integers(1, 1024),
    adapter=TEXTS,
    model=TEXTS,
    tokens=st.none(),
    priority=st.integers(-(2**31), 2**31 - 1),
    prefills_up_to=st.none() | TOKENS,
    stored=STORED,
)
RECEIPTS = st.builds(
    Receipt,
    pool=NAMES,
    policy=st.sampled_from(["dualmap", "least-loaded"]),
    rule=NAMES,
    reason=TEXTS,
    key=st.builds(Key, hash=HASHES, blocks=COUNTS, tokens=TOKENS),
    pair=st.lists(NAMES, max_size=2).map(tuple),
    chosen=NAMES,
    address=ENDPOINTS,
    prompt_tokens=TOKENS,
    matched_tokens=TOKENS,
    predicted_ttft_s=SECONDS,
    candidates=st.lists(
        st.builds(
            CandidateReceipt,
            id=NAMES,
            state=NAMES,
            matched_tokens=TOKENS,
            pending_tokens=TOKENS,
            in_flight=COUNTS,
            ttft_s=SECONDS,
            fetch_tokens=TOKENS,
        ),
        max_size=3,
    ).map(tuple),
    source=st.sampled_from(["records", "events"]),
    adapter=st.sampled_from(["", "loaded"]),
    fetch_tokens=st.none() | TOKENS,
    host=st.none() | st.builds(SessionHost, id=NAMES, source=st.just("") | ENDPOINTS),
    # The router of a request adds the prefill after the owner's answer.
    prefill=st.none(),
)
USAGES = st.builds(
    Usage,
    prompt_tokens=st.none() | TOKENS,
    completion_tokens=st.none() | TOKENS,
    cached_tokens=st.none() | TOKENS,
)
DECISIONS = st.builds(
    Decision,
    request_id=NAMES,
    endpoints=st.lists(ENDPOINTS, min_size=1, max_size=3).map(tuple),
    receipt=RECEIPTS,
    prefillers=st.just(()),
)
REJECTIONS = st.builds(
    Rejection,
    request_id=NAMES,
    reason=st.sampled_from(Reason),
    retry_after_s=st.none() | SECONDS,
    limited=st.booleans(),
)
MESSAGES = st.one_of(
    st.builds(Ask, request=REQUESTS, age_s=SECONDS),
    st.builds(Answer, outcome=DECISIONS | REJECTIONS | st.builds(Queued, request_id=NAMES)),
    st.builds(Declined, request_id=NAMES),
    st.builds(
        Sent,
        request=REQUESTS,
        age_s=SECONDS,
        endpoint=ENDPOINTS,
        sent_ago_s=SECONDS,
        matched_tokens=TOKENS,
        predicted_ttft_s=SECONDS,
        prefilled=st.booleans(),
    ),
    st.builds(
        Progress,
        request_id=NAMES,
        step=st.sampled_from(Step),
        endpoint=st.just("") | ENDPOINTS,
        usage=st.none() | USAGES,
    ),
    st.just(Left()),
)
ENTRIES = st.builds(
    AccessLogEntry,
    request_id=NAMES,
    status=st.none() | COUNTS,
    flags=st.lists(TEXTS, max_size=3).map(tuple),
    served_endpoint=st.none() | TEXTS,
    usage=st.none() | USAGES,
    sender=TEXTS,
    total_s=st.none() | st.floats(0, 1e9),
    attempts=st.none() | COUNTS,
)
CHAIN = BlockChain(hashes=(1, 2), block_tokens=128, tokens=300)
REQUEST = Request(id="a-1-0", chain=CHAIN, arrived_s=0.0)
POOL = "llm/chat"


@given(TEXTS, MESSAGES)
def test_message_round_trip_is_equal(pool: str, message: Message) -> None:
    assert decode_frame(encode_message(pool, message)) == Frame(messages=((pool, message),))


@given(ENTRIES)
def test_access_log_entry_round_trip_is_equal(entry: AccessLogEntry) -> None:
    assert decode_frame(encode_entry(entry)) == Frame(entries=(entry,))


@given(st.lists(st.tuples(TEXTS, MESSAGES), max_size=4), ENTRIES, st.binary(max_size=40))
def test_joined_frames_are_one_frame_in_order(messages, entry: AccessLogEntry, payload: bytes) -> None:
    joined = b"".join(encode_message(*each) for each in messages) + encode_entry(entry) + encode_shared(payload)

    assert decode_frame(joined) == Frame(messages=tuple(messages), entries=(entry,), shared=(payload,))


def test_frames_of_the_handshake_round_trip_are_equal() -> None:
    hello, state = Hello(version=1, name="a-1", nonce=bytes(16)), RouterState(warm=True, leaving=True)
    assert decode_frame(encode_hello(hello)) == Frame(hello=hello)
    assert decode_frame(encode_proof(b"hash") + encode_state(state)) == Frame(proof=b"hash", state=state)
    assert decode_frame(ACCEPT) == Frame(accept=True)
    assert decode_frame(b"") == Frame()


def test_token_chains_that_are_computed_round_trip() -> None:
    packed = pack_tokens(range(100))
    tokens = PromptTokens(packed, root=7, media=(Media(id="image", start=3, tokens=4),))
    chains = [tokens.chain(16), tokens.chain(32)]

    (((_, ask),),) = [decode_frame(encode_message(POOL, Ask(request=_with(tokens=tokens), age_s=0.0))).messages]

    told = ask.request.tokens
    assert told is not None
    assert told.count == 100
    assert [told.chain(16), told.chain(32)] == chains
    assert told.chain(64).keys == ()
    assert chain_tokens(packed, root=7, block_tokens=64).keys


def test_token_chains_that_are_too_long_are_left_out() -> None:
    tokens = PromptTokens(pack_tokens(range(70_000)), root=7)
    tokens.chain(1)

    (((_, ask),),) = [decode_frame(encode_message(POOL, Ask(request=_with(tokens=tokens), age_s=0.0))).messages]

    assert ask.request.tokens is None


def test_times_without_bound_are_sent_as_the_longest_time() -> None:
    frame = decode_frame(encode_message(POOL, Ask(request=REQUEST, age_s=math.inf)))
    assert frame.messages[0][1] == Ask(request=REQUEST, age_s=1e9)


def test_names_with_surrogates_are_sent_with_replacements() -> None:
    ask = Ask(request=_with(model="m\ud800", adapter="\udfff", subset=frozenset({"\ud800"})), age_s=0.0)
    (((_, told),),) = [decode_frame(encode_message(POOL, ask)).messages]
    assert (told.request.model, told.request.adapter, told.request.subset) == ("m?", "?", {"?"})


def test_fields_of_a_later_release_are_ignored() -> None:
    later = b"\x82\x7d\x03abc"  # field 2000, three bytes
    ask = wire.Frame.FromString(encode_message(POOL, Ask(request=REQUEST, age_s=1.0)))
    ask.messages[0].ask.request.MergeFromString(later)
    assert len(UnknownFieldSet(ask.messages[0].ask.request)) == 1

    frame = decode_frame(ask.SerializeToString() + later)

    assert frame == Frame(messages=((POOL, Ask(request=REQUEST, age_s=1.0)),))


def test_messages_of_a_later_release_are_ignored() -> None:
    known = wire.PoolMessage(pool=POOL, left=wire.Left())
    later = [
        wire.PoolMessage(pool=POOL),
        wire.PoolMessage(pool=POOL, answer=wire.Answer()),
        wire.PoolMessage(pool=POOL, progress=wire.Progress(request_id="a-1-0", step=99)),
        wire.PoolMessage(
            pool=POOL, answer=wire.Answer(rejection=wire.Rejection(request_id="a-1-0", reason="of_a_later_release"))
        ),
    ]
    frame = decode_frame(wire.Frame(messages=[*later, known]).SerializeToString())
    assert frame == Frame(messages=((POOL, Left()),))


def test_absent_fields_have_the_defaults_of_a_request() -> None:
    told = wire.Request(id="a-1-0", chain=wire.Chain(hashes=(1, 2), block_tokens=128, tokens=300))
    frame = wire.Frame(messages=[wire.PoolMessage(pool=POOL, ask=wire.Ask(request=told))])
    assert decode_frame(frame.SerializeToString()).messages == ((POOL, Ask(request=REQUEST, age_s=0.0)),)


HOSTILE = {
    "no request": wire.PoolMessage(ask=wire.Ask()),
    "id too long": wire.PoolMessage(declined=wire.Declined(request_id="a" * 513)),
    "no id": wire.PoolMessage(declined=wire.Declined()),
    "block of no tokens": wire.PoolMessage(
        ask=wire.Ask(request=wire.Request(id="a", chain=wire.Chain(hashes=(1,), tokens=3)))
    ),
    "too many blocks": wire.PoolMessage(
        ask=wire.Ask(request=wire.Request(id="a", chain=wire.Chain(hashes=range(MAX_BLOCKS + 1), block_tokens=1)))
    ),
    "age that is not a number": wire.PoolMessage(
        ask=wire.Ask(request=wire.Request(id="a", chain=wire.Chain(block_tokens=1)), age_s=math.nan)
    ),
    "negative age": wire.PoolMessage(
        ask=wire.Ask(request=wire.Request(id="a", chain=wire.Chain(block_tokens=1)), age_s=-1.0)
    ),
    "chain of token ids without blocks' size": wire.PoolMessage(
        ask=wire.Ask(
            request=wire.Request(id="a", chain=wire.Chain(block_tokens=1), tokens=[wire.TokenChain(keys=(1,))])
        )
    ),
    "more keys than blocks of token ids": wire.PoolMessage(
        ask=wire.Ask(
            request=wire.Request(
                id="a",
                chain=wire.Chain(block_tokens=1),
                tokens=[wire.TokenChain(keys=(1, 2), block_tokens=16, tokens=20)],
            )
        )
    ),
    "decision without endpoints": wire.PoolMessage(
        answer=wire.Answer(decision=wire.Decision(request_id="a", receipt=wire.Receipt()))
    ),
    "endpoint that is a header": wire.PoolMessage(
        sent=wire.Sent(
            request=wire.Request(id="a", chain=wire.Chain(block_tokens=1)), endpoint="10.0.0.1:80\r\nx-admin: 1"
        )
    ),
    "more tokens than a float counts": wire.PoolMessage(
        progress=wire.Progress(request_id="a", step=wire.FINISHED, usage=wire.Usage(prompt_tokens=2**63))
    ),
    "pool too long": wire.PoolMessage(pool="p" * 1025, left=wire.Left()),
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_message_is_unreadable(message: wire.PoolMessage) -> None:
    with pytest.raises(UnreadableFrame):
        decode_frame(wire.Frame(messages=[message]).SerializeToString())


@pytest.mark.parametrize("field", ["policy", "rule", "chosen", "address", "pair"])
def test_receipt_that_would_break_a_header_is_unreadable(field: str) -> None:
    receipt = wire.Receipt(
        pool=POOL,
        policy="dualmap",
        rule="rule",
        pair=["m-0"],
        chosen="m-0",
        address="10.0.0.1:8000",
        source="records",
    )
    decision = wire.Decision(request_id="a", endpoints=["10.0.0.1:8000"], receipt=receipt)
    message = wire.PoolMessage(pool=POOL, answer=wire.Answer(decision=decision))
    assert decode_frame(wire.Frame(messages=[message]).SerializeToString()).messages
    if field == "pair":
        decision.receipt.pair.append("m\r\n")
    else:
        setattr(decision.receipt, field, "m\r\n")
    message.answer.decision.CopyFrom(decision)

    with pytest.raises(UnreadableFrame):
        decode_frame(wire.Frame(messages=[message]).SerializeToString())


@given(st.binary(max_size=200))
def test_bytes_that_no_router_sends_never_fail_otherwise(data: bytes) -> None:
    with contextlib.suppress(UnreadableFrame):
        decode_frame(data)


@given(MESSAGES, st.data())
def test_damaged_message_never_fails_otherwise(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode_message(POOL, message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnreadableFrame):
        decode_frame(bytes(frame))


def _with(**fields) -> Request:
    return Request(**{"id": "a-1-0", "chain": CHAIN, "arrived_s": 0.0, **fields})
