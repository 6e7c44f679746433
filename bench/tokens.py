"""Measures the tokenizing of chat requests: its time, the loop's longest step meanwhile, and what the deadline does.

The requests are conversations about Python code. A cold request shares no text with an earlier one except the system
message. A warm request is the next turn of a conversation that was tokenized before. The loop's steps include the time
in which other programs have the processor, so the same work without the interpreter's lock is measured beside them.
"""

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import click
import orjson
from bench.decisions import pool_of

from dualmap.pools.pool import Engine, Pool, Tokenizer, TokenSource
from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Prompt, Rendered
from dualmap_extproc.errors import Refused
from dualmap_extproc.reading.processes import ReadingProcesses
from dualmap_extproc.request.reading import Bounds, LargeBody, read_small
from dualmap_extproc.request.tokens import Pending, Tokens
from dualmap_extproc.tokens.files import FilesTokenizer
from dualmap_extproc.tokens.rendering import PromptTexts
from dualmap_extproc.tokens.sources import TOKENIZE_MS, PoolTokenizers

KB = 1024
SIZES_KB = (1, 64, 220)
LARGE_KB = 1024
MESSAGE_BYTES = 2 * KB
ROUNDS = 30
AT_ONCE = (1, 4, 16, 64)
_PICK_S = 0.0002


def bodies(size_kb: int, seed: int) -> Iterator[bytes]:
    """Yield chat bodies of ``size_kb``, each of new text."""
    lines = [line for file in sorted(Path(asyncio.__file__).parent.glob("*.py")) for line in file.open()]
    chosen = random.Random(seed)
    while True:
        messages, size = [{"role": "system", "content": "You answer questions about Python code."}], 0
        while size < size_kb * KB:
            text = ""
            while len(text) < min(MESSAGE_BYTES, size_kb * KB - size):
                text += chosen.choice(lines)
            messages.append({"role": "assistant" if len(messages) % 2 == 0 else "user", "content": text})
            size += len(text) + 30
        yield orjson.dumps({"model": "m", "messages": messages})


def unusual_texts(size: int) -> Iterator[tuple[str, str]]:
    """Yield texts of ``size`` characters that a client may send to keep a thread busy, with their names."""
    chosen = random.Random(size)
    yield "random words", "".join(chosen.choices("abcdefghij klmnop ", k=size))
    yield "random letters without spaces", "".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    yield "one word, repeated without spaces", ("hello" * size)[:size]
    yield "spaces", " " * size


def next_turn(body: bytes, number: int) -> bytes:
    """Return the next turn of a conversation."""
    request = orjson.loads(body)
    request["messages"] += [
        {"role": "assistant", "content": f"Answer {number}."},
        {"role": "user", "content": f"What does line {number} do?"},
    ]
    return orjson.dumps(request)


def times_ms(folder: str, tokenizer: FilesTokenizer, size_kb: int) -> tuple[int, float, float, float]:
    """Return the tokens of a request, and the median milliseconds of cold ones, warm ones, and the chat template."""
    source, cold, warm, template, tokens = bodies(size_kb, size_kb), [], [], [], 0
    texts = PromptTexts(folder)
    for number in range(ROUNDS):
        body = next(source)
        for each, times in ((body, cold), (next_turn(body, number), warm)):
            parsed, began_s = orjson.loads(each), time.perf_counter()
            tokens = len(tokenizer.ids(parsed, Api.CHAT))
            times.append((time.perf_counter() - began_s) * 1000)
            began_s = time.perf_counter()
            texts.rendered(parsed, Api.CHAT)
            template.append((time.perf_counter() - began_s) * 1000)
    return tokens, median(cold), median(warm), median(template)


@dataclass
class Steps:
    """The steps of the event loop in seconds while something else happens."""

    seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def watched(self):  # type: ignore[no-untyped-def]
        async def watch() -> None:
            while True:
                began_s = time.perf_counter()
                await asyncio.sleep(0)
                await asyncio.sleep(_PICK_S)
                self.seconds.append(time.perf_counter() - began_s - _PICK_S)

        task = asyncio.create_task(watch())
        try:
            yield self
        finally:
            task.cancel()

    def in_words(self) -> str:
        """Return the 99th percentile and the longest step."""
        ordered = sorted(self.seconds)
        return f"{ordered[int(len(ordered) * 0.99)] * 1000:.1f} | {ordered[-1] * 1000:.1f}"


async def tokenized(
    tokenizers: PoolTokenizers, reader: ReadingProcesses, pool: Pool, body: bytes
) -> tuple[bool, float]:
    """Return whether a request has ids, and the seconds until it could be routed, as a stream would ask."""
    loop, began_s = asyncio.get_running_loop(), time.perf_counter()
    prompt: Prompt | Refused | None = read_small(body, Api.CHAT)
    small = prompt is not None
    if prompt is None:
        read: asyncio.Future[Prompt | Refused] = loop.create_future()
        bounds = {"m": Bounds(body_bytes=16 * KB * KB, tokens=131_072, tokenizer=pool.engine.tokenizer.path)}
        reader.read(LargeBody(chunks=(body,), api=Api.CHAT, bounds=bounds), lambda _, found: read.set_result(found))
        prompt = await read
    assert isinstance(prompt, Prompt)
    later: asyncio.Future[Tokens | None] = loop.create_future()
    found = tokenizers.tokens(
        pool.id, prompt, (body,), Api.CHAT, small=small, done=lambda _, tokens: later.set_result(tokens)
    )
    if isinstance(found, Pending):
        found = await later
    return found is not None, time.perf_counter() - began_s


async def measure(folder: str) -> None:
    """Print the loop's steps and the effect of the deadline."""
    pool = replace(pool_of(2, "dualmap"), engine=Engine(tokenizer=Tokenizer(source=TokenSource.FILES, path=folder)))
    tokenizers, reader = PoolTokenizers(lambda _: None), ReadingProcesses()
    tokenizers.start([pool])
    tokenizers.set_pools([pool])
    reading = asyncio.create_task(reader.run())
    await asyncio.sleep(2)

    async def ask(body: bytes) -> tuple[bool, float]:
        return await tokenized(tokenizers, reader, pool, body)

    async def repeated(size_kb: int) -> Steps:
        source, steps = bodies(size_kb, 1000 + size_kb), Steps()
        for _ in range(ROUNDS):
            body = next(source)
            async with steps.watched():
                await asyncio.sleep(_PICK_S)
                await ask(body)
                await asyncio.sleep(_PICK_S)
        return steps

    print("| while | step p99 ms | longest ms |\n|---|---|---|")
    print(f"| hashes are computed in a thread, without the lock | {(await _hashing()).in_words()} |")
    read = Steps()
    async with read.watched():
        await asyncio.to_thread(FilesTokenizer, folder)
    print(f"| the tokenizer is read in a thread | {read.in_words()} |")
    for size_kb in (*SIZES_KB, LARGE_KB):
        print(f"| requests of {size_kb} KB are tokenized, one at a time | {(await repeated(size_kb)).in_words()} |")
    print(
        f"\n| requests of 220 KB at once | with ids within {TOKENIZE_MS} ms | last one routed after ms |\n|---|---|---|"
    )
    for number in AT_ONCE:
        source = bodies(220, 2000 + number)
        every: list[Awaitable[tuple[bool, float]]] = [ask(next(source)) for _ in range(number)]
        answers = await asyncio.gather(*every)
        await asyncio.sleep(2)
        print(f"| {number} | {sum(had for had, _ in answers)} | {max(after for _, after in answers) * 1000:.0f} |")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await tokenizers.close()


async def _hashing() -> Steps:
    """Return the loop's steps while a thread works without the interpreter's lock."""
    steps, data = Steps(), bytes(1024 * KB)
    work: Callable[[], object] = lambda: [hashlib.blake2b(data).digest() for _ in range(20)]  # noqa: E731
    for _ in range(ROUNDS):
        async with steps.watched():
            await asyncio.to_thread(work)
    return steps


@click.command()
@click.option(
    "--tokenizer",
    "folder",
    type=click.Path(exists=True, file_okay=False),
    required=True,
    help="Folder with tokenizer.json and tokenizer_config.json of a model (docs/tokens.md says where to get one).",
)
def main(folder: str) -> None:
    """Measure the tokenizing of chat requests of 1, 64 and 220 KB with the files of a model (a minute)."""
    began_s = time.perf_counter()
    tokenizer = FilesTokenizer(folder)
    print(f"reading the tokenizer: {time.perf_counter() - began_s:.1f} s; cache of prefixes: {tokenizer.cached}\n")
    print("| request | tokens | cold ms | next turn ms | of each the chat template ms |\n|---|---|---|---|---|")
    for size_kb in SIZES_KB:
        tokens, cold, warm, template = times_ms(folder, tokenizer, size_kb)
        print(f"| {size_kb} KB | {tokens} | {cold:.2f} | {warm:.2f} | {template:.2f} |")
    print("\n| text of 1 MiB | tokens | ms |\n|---|---|---|")
    for name, text in unusual_texts(KB * KB):
        began_s = time.perf_counter()
        tokens = len(tokenizer.encoded(Rendered(text, special=False)))
        print(f"| {name} | {tokens} | {(time.perf_counter() - began_s) * 1000:.0f} |")
    print()
    del tokenizer
    asyncio.run(measure(folder))
    sys.exit(0)
