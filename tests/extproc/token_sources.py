"""The sources of token ids of one pool, for tests, with files or with a renderer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from aiohttp import web
from aiohttp.test_utils import TestServer

from dualmap.pools.pool import Engine, Pool, Tokenizer, TokenSource
from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Prompt
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.observations import Observation
from dualmap_extproc.request.tokens import Pending, Tokens
from dualmap_extproc.tokens.sources import PoolTokenizers
from extproc.envoy_messages import pool

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sources:
    """The sources of one pool."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pool: Pool = replace(pool(), engine=Engine(tokenizer=tokenizer))
        self.reported: list[Observation] = []
        self.tokenizers = PoolTokenizers(self.reported.append)

    def serve(self) -> None:
        self.tokenizers.start([self.pool])
        self.tokenizers.set_pools([self.pool])

    async def tokens(self, body: bytes, api: Api = Api.CHAT, *, small: bool = True) -> Tokens | None:
        """Return the tokens of a body, now or later."""
        later: asyncio.Future[Tokens | None] = asyncio.get_running_loop().create_future()
        found = self.ask([body], lambda _, tokens: later.set_result(tokens), api, small=small)
        return await later if isinstance(found, Pending) else found

    def ask(
        self,
        chunks: Sequence[bytes],
        done: Callable[[float, Tokens | None], None],
        api: Api = Api.CHAT,
        *,
        small: bool = True,
    ) -> Tokens | Pending | None:
        prompt = read(b"".join(chunks), api)
        return self.tokenizers.tokens(self.pool.id, prompt, chunks, api, small=small, done=done)


def chat(text: str = "hello", **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def read(body: bytes, api: Api = Api.CHAT) -> Prompt:
    prompt = read_body(body, api)
    assert isinstance(prompt, Prompt)
    return prompt


async def rendering(answer: Answer) -> tuple[TestServer, Sources]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions/render", answer)
    server = TestServer(application)
    await server.start_server()
    served = Sources(Tokenizer(source=TokenSource.RENDERER, url=str(server.make_url("/")).rstrip("/")))
    served.serve()
    return server, served


async def rendered(answer: Answer, body: bytes | None = None) -> Tokens | None:
    server, served = await rendering(answer)
    try:
        return await served.tokens(body or chat())
    finally:
        await served.tokenizers.close()
        await server.close()


class FailingRenderer:
    """A renderer that answers with a status, and counts the requests."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"token_ids": [1]}, status=self.status)
