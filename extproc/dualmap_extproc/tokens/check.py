"""Tokenizes one request by hand, and compares the ids with an engine's."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from dualmap.pools.pool import Pool, Tokenizer, TokenSource
from dualmap.prompts.api import Api, guess_api
from dualmap_extproc.tokens.files import Cached, FilesTokenizer
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.renderer import Renderer

_TIMEOUT_S = 30.0
# The fields of a request that an engine's /tokenize reads.
_TOKENIZE_FIELDS = (
    *("model", "messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens"),
    "continue_final_message",
)
# Fields that change the tokens, and that /tokenize does not read.
_RENDER_FIELDS: Final = ("reasoning_effort", "documents", "chat_template", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The tokens of a request.

    The request is tokenized twice: ``cold_s`` is the time of the first, ``warm_s`` and ``cached`` are those of the
    second. ``engine_ids`` are the engine's ids, None without an engine.
    """

    source: TokenSource
    ids: "array[int]"
    cold_s: float
    warm_s: float
    cached: Cached
    engine_ids: "array[int] | None" = None

    @property
    def first_difference(self) -> int | None:
        """The first position at which the engine's ids differ; None if they are equal or not known."""
        if self.engine_ids is None or self.engine_ids == self.ids:
            return None
        pairs = enumerate(zip(self.ids, self.engine_ids, strict=False))
        return next((at for at, (own, engines) in pairs if own != engines), min(len(self.ids), len(self.engine_ids)))

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        document: dict[str, object] = {
            "source": self.source.value,
            "tokens": len(self.ids),
            "seconds": self.cold_s,
            "seconds_again": self.warm_s,
            "cached_bytes": self.cached.bytes,
            "cacheable_bytes": self.cached.of_bytes,
        }
        if self.engine_ids is not None:
            at = self.first_difference
            document["engine"] = {"tokens": len(self.engine_ids), "equal": at is None, "first_difference": at}
        return document


def check(pools: Sequence[Pool], body: bytes, engine: str | None) -> Checked:
    """Tokenize a request of one of the pools. Raises UnsupportedRequest and TokenizerError."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnsupportedRequest(f"the request is not JSON: {error}") from error
    model = request.get("model") if isinstance(request, dict) else None
    pool = next((each for each in pools if model in each.model.names), None)
    if pool is None:
        raise UnsupportedRequest(f"the pool file has no model {model!r}")
    api, wanted = guess_api(request), pool.engine.tokenizer
    if wanted.source is TokenSource.FILES:
        checked = _by_files(FilesTokenizer(wanted.path), request, api)
    elif wanted.source is TokenSource.RENDERER:
        checked = asyncio.run(_by_renderer(wanted.url, body, api))
    else:
        raise UnsupportedRequest("spec.engine.tokenizer.source is Estimate; give Files or Renderer")
    if engine is None:
        return checked
    answer = asyncio.run(_of_engine(engine, body, request, api))
    return replace(checked, engine_ids=answer)


async def token_ids(tokenizer: Tokenizer, body: bytes, api: Api) -> "array[int]":
    """Return the token ids of a request from a pool's source. Raises UnsupportedRequest and TokenizerError."""
    if tokenizer.source is TokenSource.FILES:
        return FilesTokenizer(tokenizer.path).ids(orjson.loads(body), api)
    if tokenizer.source is TokenSource.RENDERER:
        return (await _by_renderer(tokenizer.url, body, api)).ids
    raise UnsupportedRequest("spec.engine.tokenizer.source is Estimate; give Files or Renderer")


def in_words(checked: Checked) -> str:
    """Return the result as text."""
    lines = [
        f"{len(checked.ids)} tokens from {checked.source.value} in {checked.cold_s * 1000:.2f} ms",
        f"again in {checked.warm_s * 1000:.2f} ms, "
        f"{checked.cached.bytes} of {checked.cached.of_bytes} bytes from the cache of prefixes",
    ]
    at, engines = checked.first_difference, checked.engine_ids
    if engines is not None and at is None:
        lines.append("the engine's ids are equal")
    elif engines is not None and at is not None:
        lines.append(
            f"the engine has {len(engines)} tokens; the first difference is at position {at}: "
            f"{checked.ids[at : at + 8].tolist()} here, {engines[at : at + 8].tolist()} in the engine"
        )
    return "\n".join(lines)


def _by_files(tokenizer: FilesTokenizer, request: object, api: Api) -> Checked:
    began_s = time.perf_counter()
    ids = tokenizer.ids(request, api)
    between_s, before = time.perf_counter(), tokenizer.cache_use()
    tokenizer.ids(request, api)
    ended_s, after = time.perf_counter(), tokenizer.cache_use()
    return Checked(
        source=TokenSource.FILES,
        ids=ids,
        cold_s=between_s - began_s,
        warm_s=ended_s - between_s,
        cached=Cached(bytes=after.bytes - before.bytes, of_bytes=after.of_bytes - before.of_bytes),
    )


async def _by_renderer(url: str, body: bytes, api: Api) -> Checked:
    renderer = Renderer()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            began_s = time.perf_counter()
            ids = await renderer.ids(url, (body,), api)
            between_s = time.perf_counter()
            await renderer.ids(url, (body,), api)
            ended_s = time.perf_counter()
    except TimeoutError:
        raise UnsupportedRequest(f"the renderer did not answer within {_TIMEOUT_S:g} s") from None
    finally:
        await renderer.close()
    cached = Cached(bytes=0, of_bytes=0)
    return Checked(
        source=TokenSource.RENDERER, ids=ids, cold_s=between_s - began_s, warm_s=ended_s - between_s, cached=cached
    )


async def _of_engine(url: str, body: bytes, request: dict[str, object], api: Api) -> "array[int]":
    """Return the ids of a request from an engine: from /tokenize, or from a render endpoint if that reads more."""
    asked = {name: request[name] for name in _TOKENIZE_FIELDS if name in request}
    is_read = api is Api.CHAT or (api is Api.COMPLETIONS and isinstance(request.get("prompt"), str))
    is_read = is_read and not any(request.get(name) for name in _RENDER_FIELDS)
    renderer = Renderer()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if is_read:
                return await renderer.tokenized(url, orjson.dumps(asked))
            return await renderer.ids(url, (body,), api)
    except TimeoutError:
        raise UnsupportedRequest(f"the engine did not answer within {_TIMEOUT_S:g} s") from None
    finally:
        await renderer.close()
