"""A stream that waits for token ids, and the comparison of the ids' number with the engine's count."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import TokenChain, pack_tokens, token_root
from dualmap.pools.pool import Engine, KvEvents
from dualmap.prompts.api import Api
from dualmap.prompts.parity import WINDOW, TokenClass
from dualmap.prompts.prompt import Prompt
from dualmap.requests import Request, Usage
from dualmap.router import PoolRouter
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Decided, TokensMismatched
from dualmap_extproc.request.reading import Done, LargeBody
from dualmap_extproc.request.stream import Phase
from dualmap_extproc.request.tokens import Pending, Tokens, TokensDone
from extproc.envoy_messages import (
    Conversation,
    chat,
    destination,
    pool,
    refused_with,
    request_body,
    request_headers,
    response_headers,
)
from extproc.stream_requests import every_mode

CLASS = TokenClass(model="m", api=Api.CHAT, has_tools=False)
TOKENS = Tokens(array("I", range(10)), CLASS)
POOL = pool().id
KV_EVENTS = replace(pool(), engine=Engine(kv_events=KvEvents(enabled=True)))
CHAINED = PromptTokens(pack_tokens(TOKENS.ids), root=token_root(model="m")).chain(2)


class Source:
    """A source of token ids that gives them at once, or when the test lets it."""

    def __init__(self, tokens: Tokens | None, *, later: bool = False) -> None:
        self.found = tokens
        self.later = later
        self.asked: list[tuple[str, str, bytes, bool]] = []
        self.waiting: list[TokensDone] = []

    def tokens(
        self, pool: str, prompt: Prompt, chunks: Sequence[bytes], api: Api, *, small: bool, done: TokensDone
    ) -> Tokens | Pending | None:
        self.asked.append((pool, prompt.model, b"".join(chunks), small))
        if not self.later:
            return self.found
        self.waiting.append(done)
        return Pending(lambda: self.waiting.remove(done))

    def finish(self, now: float = 500.0) -> None:
        self.waiting.pop()(now, self.found)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return the requests that routers get."""
    seen: list[Request] = []
    decide = PoolRouter.on_request

    def on_request(router: PoolRouter, now: float, request: Request) -> object:
        seen.append(request)
        return decide(router, now, request)

    monkeypatch.setattr(PoolRouter, "on_request", on_request)
    return seen


def sent(source: Source) -> tuple[Conversation, list[object]]:
    talk = Conversation(KV_EVENTS, tokens=source)
    return talk, [*talk.send(request_headers(), request_body(chat()))]


def chained(request: Request) -> TokenChain | None:
    """Return the chain of a request's token ids."""
    return request.tokens and request.tokens.chain(2)


def test_tokens_at_once_are_part_of_the_request(requests: list[Request]) -> None:
    source = Source(TOKENS)
    _, answers = sent(source)
    assert destination(answers[-1])
    assert [chained(each) for each in requests] == [CHAINED]
    assert source.asked == [(POOL, "m", chat(), True)]


def test_tokens_do_not_change_the_keys(requests: list[Request]) -> None:
    sent(Source(TOKENS))
    sent(Source(None))
    with_ids, without = requests
    assert with_ids.chain == without.chain
    assert without.tokens is None


def test_request_waits_for_its_tokens(requests: list[Request]) -> None:
    source = Source(TOKENS, later=True)
    talk, answers = sent(source)
    assert (talk.stream.phase, requests, talk.delivered) == (Phase.QUEUED, [], [])
    source.finish()
    assert [chained(each) for each in requests] == [CHAINED]
    assert any(destination(each) for each in talk.delivered)
    assert talk.stream.phase is Phase.ANSWERED
    assert talk.buffered.held_bytes == 0
    assert talk.observer.of(Decided)[-1].seconds == pytest.approx(500.0 - talk.now)
    assert answers[1:] == []


def test_closed_stream_does_not_wait_for_tokens() -> None:
    source = Source(TOKENS, later=True)
    talk, _ = sent(source)
    talk.close(cancelled=True)
    assert (source.waiting, talk.buffered.held_bytes, talk.in_flight) == ([], 0, 0)


def test_answer_of_envoy_ends_the_wait_for_tokens() -> None:
    source = Source(TOKENS, later=True)
    talk, _ = sent(source)
    talk.send(response_headers(503))
    assert (source.waiting, talk.in_flight) == ([], 0)


def test_prompt_of_ids_is_not_tokenized(requests: list[Request]) -> None:
    source = Source(TOKENS)
    talk = Conversation(KV_EVENTS, tokens=source)
    talk.send(request_headers(**{":path": "/v1/completions"}), request_body(b'{"model": "m", "prompt": [1, 2]}'))
    assert source.asked == []
    assert chained(requests[0]) == PromptTokens(pack_tokens([1, 2]), root=token_root(model="m")).chain(2)


def test_ids_in_a_pool_without_events_are_not_hashed(requests: list[Request]) -> None:
    talk = Conversation(tokens=Source(TOKENS))
    talk.send(request_headers(), request_body(chat()))
    assert requests[0].tokens is None


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": [1, 2]},
        {"prompt_token_ids": [1, 2]},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
        {"prompt_embeds": "AAAA"},
    ],
)
def test_ids_of_a_client_are_keyed_on_and_not_tokenized(requests: list[Request], fields: dict[str, Any]) -> None:
    source = Source(TOKENS)
    talk = Conversation(KV_EVENTS, tokens=source)
    for body in (chat(), chat(**fields)):
        talk.again()
        talk.send(request_headers(), request_body(body))
    assert [each[2] for each in source.asked] == [chat()]
    plain, named = requests
    assert named.tokens is None
    assert plain.chain.hashes != named.chain.hashes


def ended(talk: Conversation, prompt_tokens: int, *, number: int = 1) -> None:
    """Send requests; end each with the engine's count."""
    for _ in range(number):
        talk.again()
        talk.send(request_headers(), request_body(chat()))
        request_id = talk.stream._response.request_id
        entry = AccessLogEntry(request_id=request_id, status=200, usage=Usage(prompt_tokens=prompt_tokens))
        talk.picker.access_log(talk.now, entry)
        talk.close()


def test_different_counts_are_reported_and_end_the_use_of_ids(requests: list[Request]) -> None:
    talk = Conversation(KV_EVENTS, tokens=Source(TOKENS))
    ended(talk, 10)
    assert talk.picker.distrusted(POOL) == ()
    ended(talk, 11, number=2)
    assert talk.picker.distrusted(POOL) == (CLASS,)
    assert len(talk.observer.of(TokensMismatched)) == 2
    requests.clear()
    ended(talk, 10, number=WINDOW + 1)
    assert requests[0].tokens is None
    assert talk.picker.distrusted(POOL) == ()
    assert chained(requests[-1]) == CHAINED


def test_removed_pool_forgets_its_comparisons() -> None:
    talk = Conversation(tokens=Source(TOKENS))
    ended(talk, 11, number=2)
    talk.picker.set_pools(talk.now, ())
    talk.picker.set_pools(talk.now, (pool(),))
    assert talk.picker.distrusted(POOL) == ()


@every_mode
def test_request_that_waited_is_answered_as_without_tokens(config: object) -> None:
    source, plain = Source(TOKENS, later=True), Conversation()
    talk = Conversation(tokens=source)
    early = talk.send(request_headers(config), request_body(chat()))
    meanwhile = (talk.stream.phase, talk.buffered.held_bytes, talk.in_flight)
    source.finish(now=talk.now)
    expected = plain.send(request_headers(config), request_body(chat()))
    assert early + talk.delivered == expected
    assert meanwhile == (Phase.QUEUED, len(chat()), 0)
    assert talk.in_flight == 1


class HeldReader:
    """A reader whose reading ends when the test lets it."""

    def read(self, large: LargeBody, done: Done) -> Callable[[], None]:
        self.large, self.done = large, done
        return lambda: None


def test_tokens_follow_the_reading_of_a_large_body(requests: list[Request]) -> None:
    source, reader = Source(TOKENS, later=True), HeldReader()
    talk = Conversation(KV_EVENTS, tokens=source, reader=reader)
    body = chat("long text " * 60_000)
    talk.send(request_headers(), request_body(body))
    assert source.asked == []
    reader.done(200.0, read_body(body, reader.large.api))
    assert [(each[2], each[3]) for each in source.asked] == [(body, False)]
    assert (talk.stream.phase, talk.buffered.held_bytes, requests) == (Phase.QUEUED, len(body), [])
    source.finish(300.0)
    assert [chained(each) for each in requests] == [CHAINED]
    assert len(talk.observer.of(Decided)) == 1
    assert talk.buffered.held_bytes == 0


def test_request_whose_tokens_wait_counts_as_buffered() -> None:
    source = Source(TOKENS, later=True)
    talk = Conversation(tokens=source, buffered=BufferedBodies(10))
    answers = talk.send(request_headers(), request_body(chat()))
    assert refused_with(answers[-1:]) == 503
    assert (talk.buffered.held_bytes, source.waiting) == (0, [])
