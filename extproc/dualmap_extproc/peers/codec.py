"""Encodes and decodes the frames between routers (``wire/peers.proto``).

Frames can be joined: protobuf reads joined messages as one message with the fields of all. Each message is therefore
encoded when it is sent, as a frame of its own, and the connection joins frames to one write.

The decoder checks every value. It ignores unknown fields, and messages and steps that it does not know, because
the other router may have a later release. Fields of later releases have defaults.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import TokenChain
from dualmap.kv_store.view import HOLDERS_MAX, NO_MATCH, StoreMatch
from dualmap.ownership.messages import Answer, Ask, Declined, Left, Message, Progress, Sent, Step
from dualmap.prompts.blocks import MAX_BLOCKS, BlockChain
from dualmap.prompts.prompt import MAX_NAME, SEQUENCES_MAX
from dualmap.receipt import CandidateReceipt, Key, Receipt, SessionHost
from dualmap.requests import Decision, Outcome, Queued, Reason, Rejection, Request, Usage
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.wire import peers_pb2 as wire

FRAME_BYTES_MAX: Final = 8 * 2**20
"""The largest frame that a router accepts."""
MESSAGE_BYTES_MAX: Final = 4 * 2**20
"""The largest message that a router sends: a candidate has up to 400 bytes, and a pool up to 10,000 members."""
NAME_CHARACTERS: Final = 300
"""The longest name of a router: a replica id and a random number."""
ID_CHARACTERS: Final = 512
"""The longest id of a request."""
_TEXT_CHARACTERS: Final = 1024
_FLAGS_MAX: Final = 64
_SUBSET_MAX: Final = 65_536
_MEMBERS_MAX: Final = 10_000
_PAIR_MAX: Final = 16
# The most keys of all chains of a prompt's token ids: half a megabyte. A longer prompt is asked without its token ids.
_KEYS_MAX: Final = 65_536
_CHAINS_MAX: Final = 16
_TOKENS_MAX: Final = 2**53
_LONGEST_S: Final = 1e9
_FASTEST: Final = 1e9
_ENDPOINT: Final = re.compile(r"[0-9a-fA-F.:\[\]]{2,64}:[0-9]{1,5}", re.ASCII)
_WORD: Final = re.compile(r"[a-z][a-z0-9_.*-]{0,63}", re.ASCII)
_STEPS: Final = {wire.Step.Value(step.name): step for step in Step}
_REASONS: Final = {reason.value: reason for reason in Reason}


class UnreadableFrame(Exception):
    """A frame is not one that a router of any release sends; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A router's protocol version and name, and its part of what both routers hash as a proof."""

    version: int
    name: str
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Whether a router may own pools: it is ``warm`` and not ``leaving``.

    A router that has ``ended`` sends no further message, and waits until the other router has closed the connection.
    """

    warm: bool
    leaving: bool
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a router sends at once; a frame without any content says that the router is alive.

    ``messages`` are pairs of a pool's id and a message.
    """

    hello: Hello | None = None
    proof: bytes = b""
    state: RouterState | None = None
    accept: bool = False
    messages: tuple[tuple[str, Message], ...] = ()
    entries: tuple[AccessLogEntry, ...] = ()
    shared: tuple[bytes, ...] = ()


def encode_hello(hello: Hello) -> bytes:
    """Return the frame with a router's hello."""
    return wire.Frame(hello=wire.Hello(version=hello.version, name=hello.name, nonce=hello.nonce)).SerializeToString()


def encode_proof(proof: bytes) -> bytes:
    """Return the frame with a router's proof."""
    return wire.Frame(proof=wire.Proof(hash=proof)).SerializeToString()


def encode_state(state: RouterState) -> bytes:
    """Return the frame with a router's state."""
    return wire.Frame(state=wire.State(warm=state.warm, leaving=state.leaving, ended=state.ended)).SerializeToString()


ACCEPT: Final = wire.Frame(accept=True).SerializeToString()
"""The frame that says that a connection is used."""


def encode_shared(payload: bytes) -> bytes:
    """Return the frame with a payload for all routers."""
    return wire.Frame(shared=(payload,)).SerializeToString()


def encode_entry(entry: AccessLogEntry) -> bytes:
    """Return the frame with an access log entry."""
    told = wire.AccessLogEntry(
        request_id=_text(entry.request_id),
        status=entry.status,
        flags=entry.flags,
        served_endpoint=None if entry.served_endpoint is None else _text(entry.served_endpoint),
        usage=_usage(entry.usage),
        sender=_text(entry.sender or ""),
        total_s=None if entry.total_s is None else _bounded(entry.total_s),
        attempts=entry.attempts,
    )
    return wire.Frame(entries=(told,)).SerializeToString()


def encode_message(pool: str, message: Message) -> bytes:
    """Return the frame with a message about a pool."""
    match message:
        case Ask():
            ask = wire.Ask(request=_request(message.request), age_s=_bounded(message.age_s), number=message.number)
            told = wire.PoolMessage(pool=pool, ask=ask)
        case Answer():
            answer = _outcome(message.outcome)
            answer.tokens_per_second, answer.number = message.tokens_per_second, message.number
            told = wire.PoolMessage(pool=pool, answer=answer)
        case Declined():
            declined = wire.Declined(request_id=message.request_id, number=message.number)
            told = wire.PoolMessage(pool=pool, declined=declined)
        case Sent():
            told = wire.PoolMessage(pool=pool, sent=_sent(message))
        case Progress():
            progress = wire.Progress(
                request_id=message.request_id,
                step=message.step.name,
                endpoint=message.endpoint,
                usage=_usage(message.usage),
            )
            told = wire.PoolMessage(pool=pool, progress=progress)
        case Left():
            told = wire.PoolMessage(pool=pool, left=wire.Left())
    return wire.Frame(messages=(told,)).SerializeToString()


def decode_frame(data: bytes, *, bytes_max: int = FRAME_BYTES_MAX) -> Frame:
    """Return the content of a frame. Raises UnreadableFrame."""
    if len(data) > bytes_max:
        raise UnreadableFrame(f"a frame of {len(data)} bytes")
    try:
        frame = wire.Frame.FromString(data)
    except DecodeError as error:
        raise UnreadableFrame(str(error)) from None
    messages = ((_read_text(each.pool, "pool"), _read_message(each)) for each in frame.messages)
    return Frame(
        hello=_read_hello(frame.hello) if frame.HasField("hello") else None,
        proof=frame.proof.hash,
        state=_read_state(frame.state) if frame.HasField("state") else None,
        accept=frame.accept,
        messages=tuple((pool, message) for pool, message in messages if message is not None),
        entries=tuple(_read_entry(each) for each in frame.entries),
        shared=tuple(frame.shared),
    )


# Values to protobuf messages.


def _request(request: Request) -> wire.Request:
    chain, subset = request.chain, request.subset
    return wire.Request(
        id=request.id,
        chain=wire.Chain(
            hashes=chain.hashes,
            block_tokens=chain.block_tokens,
            tokens=chain.tokens,
            exact=chain.exact,
            full_blocks=chain.full_blocks,
        ),
        subset=None if subset is None else wire.Subset(endpoints=map(_text, subset)),
        whole=not request.streamed,
        session=request.session,
        client=request.client,
        client_is_salt=request.client_is_salt,
        incomparable=not request.comparable,
        tokens=_token_chains(request.tokens),
        sequences=request.sequences,
        adapter=_text(request.adapter),
        model=_text(request.model),
        priority=request.priority,
        prefills_up_to=request.prefills_up_to,
        stored=_stored(request.stored),
    )


def _stored(stored: StoreMatch) -> wire.Stored | None:
    if not stored.tokens:
        return None
    holders = stored.held_at[:HOLDERS_MAX]
    return wire.Stored(
        tokens=stored.tokens,
        held_at=[wire.Holder(address=_text(address), tokens=tokens) for address, tokens in holders],
    )


def _token_chains(tokens: PromptTokens | None) -> Iterable[wire.TokenChain]:
    chains = () if tokens is None else tokens.computed[:_CHAINS_MAX]
    if sum(len(chain.keys) for chain in chains) > _KEYS_MAX:
        return ()
    return [wire.TokenChain(keys=chain.keys, block_tokens=chain.block_tokens, tokens=chain.tokens) for chain in chains]


def _sent(message: Sent) -> wire.Sent:
    return wire.Sent(
        request=_request(message.request),
        age_s=_bounded(message.age_s),
        endpoint=message.endpoint,
        sent_ago_s=_bounded(message.sent_ago_s),
        matched_tokens=message.matched_tokens,
        predicted_ttft_s=_bounded(message.predicted_ttft_s),
        prefilled=message.prefilled,
    )


def _outcome(outcome: Outcome) -> wire.Answer:
    match outcome:
        case Decision():
            decision = wire.Decision(
                request_id=outcome.request_id, endpoints=outcome.endpoints, receipt=_receipt(outcome.receipt)
            )
            return wire.Answer(decision=decision)
        case Rejection():
            rejection = wire.Rejection(
                request_id=outcome.request_id,
                reason=outcome.reason.value,
                retry_after_s=None if outcome.retry_after_s is None else _bounded(outcome.retry_after_s),
                limited=outcome.limited,
            )
            return wire.Answer(rejection=rejection)
        case Queued():
            return wire.Answer(queued=wire.Queued(request_id=outcome.request_id))


def _receipt(receipt: Receipt) -> wire.Receipt:
    return wire.Receipt(
        pool=receipt.pool,
        policy=receipt.policy,
        rule=receipt.rule,
        reason=receipt.reason,
        key_hash=receipt.key.hash,
        key_blocks=receipt.key.blocks,
        key_tokens=receipt.key.tokens,
        pair=receipt.pair,
        chosen=receipt.chosen,
        address=receipt.address,
        prompt_tokens=receipt.prompt_tokens,
        matched_tokens=receipt.matched_tokens,
        predicted_ttft_s=_bounded(receipt.predicted_ttft_s),
        candidates=[
            wire.Candidate(
                id=each.id,
                state=each.state,
                matched_tokens=each.matched_tokens,
                pending_tokens=each.pending_tokens,
                in_flight=each.in_flight,
                ttft_s=_bounded(each.ttft_s),
                fetch_tokens=each.fetch_tokens,
            )
            for each in receipt.candidates
        ],
        source=receipt.source,
        adapter=receipt.adapter,
        fetch_tokens=receipt.fetch_tokens,
        host=None if receipt.host is None else receipt.host.id,
        host_source=None if receipt.host is None else receipt.host.source,
    )


def _usage(usage: Usage | None) -> wire.Usage | None:
    if usage is None:
        return None
    return wire.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _text(text: str) -> str:
    """Return a client's text as protobuf accepts it, with a replacement for surrogates."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _bounded(seconds: float) -> float:
    """Return seconds within the bounds that readers accept; infinity becomes the longest time."""
    return min(max(seconds, 0.0), _LONGEST_S)


# Protobuf messages to values.


def _read_hello(hello: wire.Hello) -> Hello:
    return Hello(version=hello.version, name=_read_name(hello.name), nonce=hello.nonce)


def _read_state(told: wire.State) -> RouterState:
    return RouterState(warm=told.warm, leaving=told.leaving, ended=told.ended)


def _read_message(told: wire.PoolMessage) -> Message | None:
    """Return a message; None if this release does not know its kind."""
    match told.WhichOneof("message"):
        case "ask":
            return Ask(request=_read_request(told.ask.request), age_s=_seconds(told.ask.age_s), number=told.ask.number)
        case "answer":
            outcome = _read_outcome(told.answer)
            if outcome is None:
                return None
            speed = told.answer.tokens_per_second
            _check(0.0 <= speed <= _FASTEST, "speed")
            return Answer(outcome=outcome, tokens_per_second=speed, number=told.answer.number)
        case "declined":
            return Declined(request_id=_read_id(told.declined.request_id), number=told.declined.number)
        case "sent":
            return _read_sent(told.sent)
        case "progress":
            return _read_progress(told.progress)
        case "left":
            return Left()
    return None


def _read_request(told: wire.Request) -> Request:
    subset = None
    if told.HasField("subset"):
        _check(len(told.subset.endpoints) <= _SUBSET_MAX, "endpoints in a subset")
        subset = frozenset(_read_text(each, "endpoint") for each in told.subset.endpoints)
    return Request(
        id=_read_id(told.id),
        chain=_read_chain(told.chain),
        # The receiver replaces the time of arrival by its own clock and the age in the message.
        arrived_s=0.0,
        subset=subset,
        streamed=not told.whole,
        session=told.session if told.HasField("session") else None,
        client=told.client,
        client_is_salt=told.client_is_salt,
        comparable=not told.incomparable,
        tokens=_read_tokens(told.tokens),
        sequences=min(max(told.sequences, 1), SEQUENCES_MAX),
        adapter=_read_text(told.adapter, "adapter", most=MAX_NAME),
        model=_read_text(told.model, "model", most=MAX_NAME),
        priority=told.priority,
        prefills_up_to=_tokens(told.prefills_up_to) if told.HasField("prefills_up_to") else None,
        stored=_read_stored(told.stored) if told.HasField("stored") else NO_MATCH,
    )


def _read_stored(told: wire.Stored) -> StoreMatch:
    _check(len(told.held_at) <= HOLDERS_MAX, "holders of a prompt")
    held_at = tuple((_read_text(each.address, "address"), _tokens(each.tokens)) for each in told.held_at)
    return StoreMatch(_tokens(told.tokens), held_at)


def _read_chain(told: wire.Chain) -> BlockChain:
    full_blocks = told.full_blocks if told.HasField("full_blocks") else None
    _check(len(told.hashes) <= MAX_BLOCKS, "blocks of a prompt")
    _check(told.block_tokens > 0, "tokens of a block")
    _check(max(told.tokens, full_blocks or 0) <= _TOKENS_MAX, "tokens of a prompt")
    return BlockChain(
        hashes=tuple(told.hashes),
        block_tokens=told.block_tokens,
        tokens=told.tokens,
        exact=told.exact,
        full_blocks=full_blocks,
    )


def _read_tokens(told: Iterable[wire.TokenChain]) -> PromptTokens | None:
    chains = [TokenChain(keys=tuple(each.keys), block_tokens=each.block_tokens, tokens=each.tokens) for each in told]
    if not chains:
        return None
    _check(len(chains) <= _CHAINS_MAX, "chains of token ids")
    for chain in chains:
        _check(chain.block_tokens > 0 and chain.tokens == chains[0].tokens <= _TOKENS_MAX, "tokens of a chain")
        _check(len(chain.keys) <= min(_KEYS_MAX, chain.tokens // chain.block_tokens), "keys of a chain")
    return PromptTokens.of_chains(chains, count=chains[0].tokens)


def _read_sent(told: wire.Sent) -> Sent:
    return Sent(
        request=_read_request(told.request),
        age_s=_seconds(told.age_s),
        endpoint=_read_endpoint(told.endpoint),
        sent_ago_s=_seconds(told.sent_ago_s),
        matched_tokens=_tokens(told.matched_tokens),
        predicted_ttft_s=_seconds(told.predicted_ttft_s),
        prefilled=told.prefilled,
    )


def _read_progress(told: wire.Progress) -> Progress | None:
    step = _STEPS.get(told.step)
    if step is None:
        return None
    return Progress(
        request_id=_read_id(told.request_id),
        step=step,
        endpoint=_read_endpoint(told.endpoint) if told.endpoint else "",
        usage=_read_usage(told.usage) if told.HasField("usage") else None,
    )


def _read_outcome(told: wire.Answer) -> Outcome | None:
    match told.WhichOneof("outcome"):
        case "decision":
            decision = told.decision
            _check(0 < len(decision.endpoints) <= _MEMBERS_MAX, "endpoints of a decision")
            return Decision(
                request_id=_read_id(decision.request_id),
                endpoints=tuple(_read_endpoint(each) for each in decision.endpoints),
                receipt=_read_receipt(decision.receipt),
            )
        case "rejection":
            rejection = told.rejection
            reason = _REASONS.get(rejection.reason)
            if reason is None:
                return None
            return Rejection(
                request_id=_read_id(rejection.request_id),
                reason=reason,
                retry_after_s=_seconds(rejection.retry_after_s) if rejection.HasField("retry_after_s") else None,
                limited=rejection.limited,
            )
        case "queued":
            return Queued(request_id=_read_id(told.queued.request_id))
    return None


def _read_receipt(told: wire.Receipt) -> Receipt:
    _check(len(told.pair) <= _PAIR_MAX, "members of a pair")
    _check(len(told.candidates) <= _MEMBERS_MAX, "candidates")
    _check(_WORD.fullmatch(told.policy) is not None, "policy")
    return Receipt(
        pool=_read_name(told.pool),
        policy=told.policy,
        rule=_read_name(told.rule),
        reason=_read_text(told.reason, "reason"),
        key=Key(hash=told.key_hash, blocks=told.key_blocks, tokens=_tokens(told.key_tokens)),
        pair=tuple(_read_name(each) for each in told.pair),
        chosen=_read_name(told.chosen),
        address=_read_endpoint(told.address),
        prompt_tokens=_tokens(told.prompt_tokens),
        matched_tokens=_tokens(told.matched_tokens),
        predicted_ttft_s=_seconds(told.predicted_ttft_s),
        candidates=tuple(
            CandidateReceipt(
                id=_read_name(each.id),
                state=_read_name(each.state),
                matched_tokens=_tokens(each.matched_tokens),
                pending_tokens=_tokens(each.pending_tokens),
                in_flight=each.in_flight,
                ttft_s=_seconds(each.ttft_s),
                fetch_tokens=_tokens(each.fetch_tokens),
            )
            for each in told.candidates
        ),
        source=_read_name(told.source),
        adapter=_read_ascii(told.adapter),
        fetch_tokens=_tokens(told.fetch_tokens) if told.HasField("fetch_tokens") else None,
        host=_read_host(told) if told.host else None,
    )


def _read_host(told: wire.Receipt) -> SessionHost:
    return SessionHost(_read_name(told.host), _read_endpoint(told.host_source) if told.host_source else "")


def _read_entry(told: wire.AccessLogEntry) -> AccessLogEntry:
    _check(len(told.flags) <= _FLAGS_MAX, "flags")
    return AccessLogEntry(
        request_id=_read_id(told.request_id),
        status=told.status if told.HasField("status") else None,
        flags=tuple(_read_text(each, "flag") for each in told.flags),
        served_endpoint=_read_text(told.served_endpoint, "endpoint") if told.HasField("served_endpoint") else None,
        usage=_read_usage(told.usage) if told.HasField("usage") else None,
        sender=_read_text(told.sender, "sender"),
        total_s=_seconds(told.total_s) if told.HasField("total_s") else None,
        attempts=told.attempts if told.HasField("attempts") else None,
    )


def _read_usage(told: wire.Usage) -> Usage:
    return Usage(
        prompt_tokens=_tokens(told.prompt_tokens) if told.HasField("prompt_tokens") else None,
        completion_tokens=_tokens(told.completion_tokens) if told.HasField("completion_tokens") else None,
        cached_tokens=_tokens(told.cached_tokens) if told.HasField("cached_tokens") else None,
    )


def _check(valid: bool, what: str) -> None:
    if not valid:
        raise UnreadableFrame(f"invalid {what}")


def _read_text(text: str, what: str, most: int = _TEXT_CHARACTERS) -> str:
    _check(len(text) <= most, f"{what} of {len(text)} characters")
    return text


def _read_id(text: str) -> str:
    _check(bool(text) and len(text) <= ID_CHARACTERS, "request id")
    return text


def _read_name(text: str) -> str:
    """Return a name that is not empty and may be part of a header."""
    _check(bool(text), "name without characters")
    return _read_ascii(text)


def _read_ascii(text: str) -> str:
    _check(len(text) <= NAME_CHARACTERS and text.isascii() and text.isprintable(), "name")
    return text


def _read_endpoint(text: str) -> str:
    _check(_ENDPOINT.fullmatch(text) is not None, "endpoint")
    return text


def _tokens(value: int) -> int:
    _check(value <= _TOKENS_MAX, "number of tokens")
    return value


def _seconds(value: float) -> float:
    # The comparison rejects NaN too: every comparison with NaN is false.
    _check(0.0 <= value <= _LONGEST_S, "number of seconds")
    return value
