"""Makes the decision of a newly started router, for the command ``dualmap explain``.

The decision comes from the router's own class ``Picker``, without earlier requests. With Redis, the picker first reads
the state that the other routers share. The KV store of the request's pool is asked as a router asks it.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dualmap.objects.times import time_text
from dualmap.pools.pool import Member, MemberState, Pool
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap.receipt import Receipt
from dualmap_edge.logs import clipped
from dualmap_extproc.app.stored import Stored, StoreState, stored_of
from dualmap_extproc.errors import Refused, no_endpoint
from dualmap_extproc.request.body import guess_api_of, read_body
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.tokens import Tokens
from dualmap_extproc.settings import Limits, RedisSettings
from dualmap_extproc.store.contract import Failure, Question, StoreError
from dualmap_extproc.store.exchange import AnswerDelivery, history_s
from dualmap_extproc.store.target import target_of

# The current time for the picker. The value is arbitrary, but larger than the age of any update from another router.
_NOW_S: Final = 86_400.0
_NAME: Final = "explain"
_ADAPTER_WORDS: Final = {
    "loaded": "loaded at {member}",
    "absent": "not loaded at {member}",
    "unknown": "not known whether {member} has loaded it",
}
_SOURCE_WORDS: Final = {
    "records": "the router's own records",
    "events": "its engine's KV events",
}
READ_S: Final = 2.0
"""The timeout for an answer of Redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A decision, and what the KV store of its pool said about the prompt; None for a pool without a store."""

    receipt: Receipt
    stored: Stored | None

    def as_json(self) -> dict[str, object]:
        """Return the values as JSON values."""
        receipt = self.receipt.as_json()
        return receipt if self.stored is None else {**receipt, "kv_store": self.stored.as_json()}


def decide(
    pools: tuple[Pool, ...],
    body: bytes,
    *,
    headers: Mapping[str, str],
    hash_key: bytes = PUBLIC_KEY,
    redis: RedisSettings | None = None,
) -> Explained | Refused:
    """Return the decision of a newly started router for a request, or its error answer.

    The names in ``headers`` are lower-case. ``hash_key`` is the key of the prompts' hashes. With ``redis``, the router
    first reads the state that the other routers share. Raises StoreError if Redis does not answer.
    """
    picker = _picker(pools, hash_key)
    outcome = _pick(picker, body, headers)
    if isinstance(outcome, Refused):
        return outcome
    stored = _stored(picker, body)
    if stored is not None or redis is not None:
        picker = _picker(pools, hash_key)
        if redis is not None:
            replica = _picker(pools, hash_key, replicated=True)
            asyncio.run(_read(picker, redis, _wanted(replica, body, headers)))
        outcome = _pick(picker, body, headers, None if stored is None else stored.tokens)
    if isinstance(outcome, Refused):
        return outcome
    assert outcome.decision is not None, "a pick with a prompt has a decision"
    return Explained(receipt=outcome.decision.receipt, stored=stored)


def _stored(picker: Picker, body: bytes) -> Stored | None:
    """Return what the KV store says about the prompt of a body that the picker accepts; None without a store."""
    api = guess_api_of(body)
    prompt = read_body(body, api)
    assert not isinstance(prompt, Refused), "the picker has accepted the body"
    pool = picker.pool(picker.pool_of(prompt.model) or "")
    if pool is None or not pool.kv_store.is_used:
        return None
    return asyncio.run(stored_of(pool, prompt, body, api))


def _picker(pools: tuple[Pool, ...], hash_key: bytes, *, replicated: bool = False) -> Picker:
    picker = Picker(
        Limits(),
        FanOut().report,
        id_prefix=_NAME,
        hash_key=hash_key,
        replicated=replicated,
        epoch_s=time.time() - _NOW_S,
    )
    picker.set_pools(_NOW_S, pools)
    # The picker must not queue the request, so that the result is the chosen member, even if the member is saturated.
    picker.stop_queueing(_NOW_S)
    return picker


def _pick(picker: Picker, body: bytes, headers: Mapping[str, str], tokens: Tokens | None = None) -> Picked | Refused:
    named = {name: value for name, value in headers.items() if name in picker.kept_headers}
    outcome = picker.pick_read(
        _NOW_S,
        read_body(body, guess_api_of(body)),
        None,
        _NOW_S,
        size_bytes=len(body),
        headers=named,
        resume=lambda _: None,
        tokens=tokens,
    )
    # Only a request to a pool without members gets AnswerLater here.
    return no_endpoint("") if isinstance(outcome, AnswerLater) else outcome


def _wanted(picker: Picker, body: bytes, headers: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the sessions with bindings that a replicated router would read for this request, by pool."""
    _pick(picker, body, headers)
    return {pool: update.wanted for pool, update in picker.take_update(_NOW_S)}


async def _read(picker: Picker, redis: RedisSettings, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Read the state that a starting router reads, and pass it to the picker. Raises StoreError."""
    from dualmap_extproc.store.redis import RedisStore  # This import takes 0.4 s.

    store = RedisStore(target_of(redis))
    deliveries = {pool.id: AnswerDelivery(picker, lambda: _NOW_S, pool.id) for pool in picker.pools}
    questions = [
        Question(pool=pool.id, window_s=history_s(pool), wanted=wanted.get(pool.id, ())) for pool in picker.pools
    ]
    try:
        while questions:
            async with asyncio.timeout(READ_S):
                answers = await store.read(_NAME, questions)
            answered = list(zip(questions, answers, strict=True))
            for question, answer in answered:
                await deliveries[question.pool].deliver(answer)
            questions = [replace(each, cursor=answer.cursor, wanted=()) for each, answer in answered if answer.more]
    except TimeoutError:
        raise StoreError(Failure.TIMEOUT, f"Redis did not answer within {READ_S:g} s") from None
    finally:
        await store.close()


def in_words(explained: Explained, pools: Iterable[Pool]) -> str:
    """Return the text of a decision for people, with the members of its pool that get no new keys."""
    receipt, known = explained.receipt, {pool.id: pool for pool in pools}
    lines = [
        f"{receipt.chosen} ({receipt.address}) gets this request of pool {receipt.pool}.",
        *_choice(receipt, known[receipt.pool], explained.stored),
    ]
    prefill = receipt.prefill
    if prefill is None:
        return "\n".join(lines)
    if prefill.receipt is None:
        lines.append(f"Prefill: {receipt.chosen} computes the prompt itself, because {prefill.meaning}.")
    else:
        chosen = prefill.receipt
        lines.append(f"Prefill: {chosen.chosen} ({chosen.address}) of pool {chosen.pool} computes the prompt.")
        lines += [f"  {line}" for line in _choice(chosen, known[chosen.pool])]
    return "\n".join(lines)


def _choice(receipt: Receipt, pool: Pool, stored: Stored | None = None) -> list[str]:
    """Return the reason for the choice of a member of ``pool``, in lines."""
    lines = [
        f"Reason: {receipt.reason} (policy {receipt.policy}, rule {receipt.rule}).",
        f"Key: {_key(receipt)} ({receipt.key.hash:016x}).",
        f"Pair: {' and '.join(receipt.pair)}, by ring 1 and ring 2.",
    ]
    lines += _left_out(receipt, pool)
    if receipt.moved_from:
        source = f"; {receipt.chosen} can fetch its KV from {receipt.kv_source}" if receipt.kv_source else ""
        lines.append(f"Session: moves from {receipt.moved_from} to {receipt.chosen}{source}.")
    if receipt.adapter:
        lines.append(f"Adapter: {_ADAPTER_WORDS[receipt.adapter].format(member=receipt.chosen)}.")
    if stored is not None:
        lines.append(_store(stored, pool))
    if pool.routing.session.migration.pull:
        lines.append("Sessions' KV: only a running router knows what a session's instance caches.")
    lines += [f"Tokens that {receipt.chosen} holds: known from {_SOURCE_WORDS[receipt.source]}.", "Candidates:"]
    # Without an answer of the store, it is not known what would be fetched.
    fetch_is_known = stored is not None and stored.state is StoreState.ANSWERED
    for each in receipt.candidates:
        held = f" holds {_count(each.matched_tokens, 'token')} of the prompt," if receipt.prompt_tokens else ""
        if fetch_is_known and receipt.prompt_tokens:
            computed = receipt.prompt_tokens - each.matched_tokens - each.fetch_tokens
            held += f" would fetch {_count(each.fetch_tokens, 'token')} and compute {computed},"
        lines += [
            f"  {each.id} ({each.state}):{held}",
            f"    {_count(each.pending_tokens, 'prefill token')} pending,"
            f" {_count(each.in_flight, 'request')} in flight; predicted TTFT {_duration(each.ttft_s)}",
        ]
    return lines


def _store(stored: Stored, pool: Pool) -> str:
    """Return what the KV store of a pool said, as a line."""
    match stored.state:
        case StoreState.ANSWERED:
            said = f"{pool.kv_store.endpoint} holds {_count(stored.held_tokens, 'token')} of the prompt"
        case StoreState.FAILED:
            said = f"gave no answer, so fetched tokens are not known ({stored.reason})"
        case _:
            said = f"not asked, because {stored.reason}"
    return f"KV store: {said}."


def _left_out(receipt: Receipt, pool: Pool) -> list[str]:
    """Return a line with the members that get no new keys, and why; none if these members are the only ones."""
    if not any(each.takes_new_keys for each in pool.members):
        return []
    left_out = clipped(
        f"{each.id} ({_why_no_keys(each)})"
        for each in pool.members
        if not each.takes_new_keys and each.id != receipt.chosen
    )
    return [f"Without new keys: {', '.join(left_out)}."] if left_out else []


def _why_no_keys(member: Member) -> str:
    if member.leave_at_s is not None:
        return f"leaves at {time_text(member.leave_at_s)}"
    return "draining" if member.state is MemberState.DRAINING else "weight 0"


def _key(receipt: Receipt) -> str:
    if not receipt.key.blocks:
        return "no prompt, so the request's own id"
    key = receipt.key
    return f"{_count(key.blocks, 'block')}, {key.tokens} of the prompt's {_count(receipt.prompt_tokens, 'token')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
