"""Lines of ended requests: equal to those of the values that they mean, with every field and with none."""

import random

import builders
from core.routers import decide
from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import PrefillReceipt, Receipt, SessionHost
from dualmap.recordings.lines import decode_line, encode_line
from dualmap.recordings.values import RecordedOutcome, RecordedReceipt, RecordedRequest
from dualmap.requests import Request, Usage
from dualmap.router import PoolRouter
from dualmap_extproc.recording.encoding import encoded_requests
from dualmap_extproc.recording.hashing import KeyedHashes, Purpose
from dualmap_extproc.recording.requests import OpenRequest
from dualmap_extproc.request.ending import AccessLogEntry, Ending

HASHES = KeyedHashes(b"s" * 32)
BLOCKS = tuple(random.Random(3).getrandbits(64) for _ in range(3))


def receipt_of(name: str) -> Receipt:
    return decide(PoolRouter(builders.pool()), name, builders.text_of(500, name)).receipt


def recorded_receipt(receipt: Receipt, **more: object) -> RecordedReceipt:
    """Return what a line says of a receipt of two candidates."""
    return RecordedReceipt(
        policy=receipt.policy,
        rule=receipt.rule,
        pair=receipt.pair,
        chosen=receipt.chosen,
        prompt_tokens=receipt.prompt_tokens,
        matched_tokens=receipt.matched_tokens,
        key_blocks=receipt.key.blocks,
        key_tokens=receipt.key.tokens,
        predicted_ttft_s=round(receipt.predicted_ttft_s, 6),
        candidates=tuple(each._replace(ttft_s=round(each.ttft_s, 6)) for each in receipt.candidates),
    )._replace(**more)


def full() -> tuple[OpenRequest, RecordedRequest]:
    """Return a request of which everything is known, and its value."""
    prefilled, receipt = receipt_of("prefill"), receipt_of("decode")
    first, *others = receipt.candidates
    receipt = receipt._replace(
        source="events",
        fetch_tokens=0,
        host=SessionHost("m-7", ""),
        prefill=PrefillReceipt("llm/prefill", prefilled),
        candidates=(first._replace(fetch_tokens=128), *others),
    )
    request = Request(
        "r",
        BlockChain(BLOCKS, 16, 40, exact=True, full_blocks=2),
        arrived_s=10.1234567,
        streamed=False,
        session=5,
        client=6,
        comparable=False,
        sequences=2,
        adapter="lora",
        model="m",
        priority=-1,
    )
    usage = Usage(prompt_tokens=41, completion_tokens=0, cached_tokens=32)
    opened = OpenRequest("llm/qwen", request, "4711", receipt, queued_s=0.5, ttft_s=-1e-9, ended_s=99.0)
    opened.entry = AccessLogEntry(request_id="r", status=200, usage=usage, total_s=1e12, attempts=2)
    opened.refusal, opened.served = "queue_full", "m-3"
    return opened, RecordedRequest(
        arrived_s=1010.123457,
        pool="llm/qwen",
        model="m",
        streamed=False,
        prompt_tokens=40,
        block_tokens=16,
        blocks=HASHES.keyed(BLOCKS, Purpose.BLOCK),
        outcome=RecordedOutcome.REFUSED,
        full_blocks=2,
        exact=True,
        adapter="lora",
        priority=-1,
        sequences=2,
        session=HASHES.one(5, Purpose.SESSION),
        client=HASHES.one(6, Purpose.CLIENT),
        request=HASHES.text("4711", Purpose.REQUEST),
        receipt=recorded_receipt(
            receipt, source="events", fetch_tokens=0, moved_from="m-7", prefill="remote", prefiller=prefilled.chosen
        ),
        code="queue_full",
        served="m-3",
        attempts=2,
        queued_s=0.5,
        ttft_s=0.0,
        duration_s=1e8,
        engine_prompt_tokens=41,
        output_tokens=0,
        cached_tokens=32,
        comparable=False,
    )


def bare() -> tuple[OpenRequest, RecordedRequest]:
    """Return a request without a prompt's blocks of which no end was reported, and its value."""
    request = Request("r", BlockChain((), 16, 0), arrived_s=1.0)
    return OpenRequest("llm/qwen", request, "", ending=Ending.ABORTED), RecordedRequest(
        arrived_s=1001.0,
        pool="llm/qwen",
        model="",
        streamed=True,
        prompt_tokens=0,
        block_tokens=16,
        blocks=(),
        outcome=RecordedOutcome.CLIENT_GONE,
    )


def decided() -> tuple[OpenRequest, RecordedRequest]:
    """Return a request with the receipt of a pool without more than the defaults, and its value."""
    receipt = receipt_of("only")
    request = Request("r", BlockChain(BLOCKS[:1], 16, 16), arrived_s=2.0, client=6)
    return OpenRequest("llm/qwen", request, "", receipt, ended_s=4.5, ending=Ending.FINISHED), RecordedRequest(
        arrived_s=1002.0,
        pool="llm/qwen",
        model="",
        streamed=True,
        prompt_tokens=16,
        block_tokens=16,
        blocks=HASHES.keyed(BLOCKS[:1], Purpose.BLOCK),
        outcome=RecordedOutcome.OK,
        client=HASHES.one(6, Purpose.CLIENT),
        receipt=recorded_receipt(receipt),
        duration_s=2.5,
    )


def test_encoded_requests_are_the_lines_of_their_values() -> None:
    requests, values = zip(full(), bare(), decided(), full(), strict=True)

    lines = [each.decode() for each in encoded_requests(requests, HASHES, 1000.0)]

    assert lines == [encode_line(each) for each in values]
    assert [decode_line(each) for each in lines] == list(values)


def test_encoded_request_with_a_lone_surrogate_is_readable() -> None:
    opened, value = bare()
    opened.request = opened.request._replace(model="\ud800")

    (line,) = encoded_requests([opened], HASHES, 1000.0)

    assert decode_line(line.decode()) == value._replace(model="\ud800")
