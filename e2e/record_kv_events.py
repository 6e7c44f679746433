"""Records the KV events of a real vLLM, beside its token ids and cached tokens of each request.

Run as ``PYTHONPATH=tests:testing .venv/bin/python e2e/record_kv_events.py [FILE]``. DUALMAP_VLLM_PYTHON names the
Python of a vLLM installation, such as ``$PWD/.vllm/bin/python`` after ``make vllm``.
tests/core/engines/test_kv_recordings.py reads the recording.
"""

import asyncio
import base64
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from harness.vllm import BLOCK_TOKENS, MODEL, PYTHON, Vllm, make_model

COMMAND = "PYTHONPATH=tests:testing DUALMAP_VLLM_PYTHON=$PWD/.vllm/bin/python .venv/bin/python e2e/record_kv_events.py"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCKS = 64
LONGEST_PROMPT = 1024
QUIET_S = 1.0
"""An engine publishes the events of a request before this time after the answer."""


class Recorder:
    """Sends requests to one engine, each after the events of the request before."""

    def __init__(self, engine: Vllm, events: zmq.asyncio.Socket) -> None:
        self.steps: list[dict[str, Any]] = []
        self._engine = engine
        self._events = events

    async def ask(self, name: str, path: str, body: dict[str, Any]) -> None:
        """Send a request."""
        body = {"model": MODEL, "max_tokens": 1, "temperature": 0, **body}
        rendered = await self._engine.post(f"{path}/render", body)
        (prompt,) = rendered if isinstance(rendered, list) else [rendered]
        usage = (await self._engine.post(path, body))["usage"]
        await self._note(
            name,
            cache_salt=body.get("cache_salt", ""),
            tokens=prompt["token_ids"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )

    async def reset(self) -> None:
        """Empty the engine's prefix cache. The engine reports it with its next step."""
        await self._engine.post("/reset_prefix_cache")
        await self._note("reset")

    async def restart(self) -> None:
        """Kill the engine and start it again at the same ports."""
        await self._engine.kill()
        await self._engine.start()
        await self._note("restart")

    async def _note(self, name: str, **request: Any) -> None:
        """Add a step with the messages that arrived since the last one."""
        messages = []
        while await self._events.poll(round(QUIET_S * 1000)):
            messages.append([base64.b64encode(frame).decode() for frame in await self._events.recv_multipart()])
        self.steps.append({"step": name, **request, "messages": messages})
        print(name, request.get("prompt_tokens"), request.get("cached_tokens"), len(messages))


def text(seed: str, words: int) -> str:
    """Return a text of this many words, which begins differently for each seed."""
    chooser = random.Random(seed)
    return f"{seed}: " + " ".join(chooser.choice(("import", "yield", "async", "with", "open")) for _ in range(words))


def chat(prompt: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request of one message."""
    return {"messages": [{"role": "user", "content": prompt}], **fields}


async def scenario(recorder: Recorder) -> None:
    """Send requests that store, share, copy and evict blocks; reset the cache; restart the engine."""
    ask = recorder.ask
    first, shared, whole = text("first", 200), text("shared", 160), list(range(100, 100 + 4 * BLOCK_TOKENS))
    await ask("first prompt", CHAT, chat(first))
    await ask("first prompt again", CHAT, chat(first))
    await ask("answer of three blocks", CHAT, chat("answer", max_tokens=3 * BLOCK_TOKENS, ignore_eos=True))
    await ask("beginning", CHAT, chat(shared))
    await ask("same beginning", CHAT, chat(shared + text("one", 60)))
    await ask("same beginning again", CHAT, chat(shared + text("two", 60)))
    # The engine computes the last block again, into a second copy.
    for name in ("whole blocks", "whole blocks again", "whole blocks, third time"):
        await ask(name, COMPLETIONS, {"prompt": whole})
    for salt in ("tenant-1", "tenant-1", "tenant-2"):
        await ask(f"salt {salt}", CHAT, chat(first, cache_salt=salt))
    for number in range(5):
        await ask(f"other prompt {number}", CHAT, chat(text(f"other {number}", 350)))
    await ask("evicted prompt", CHAT, chat(first))
    await ask("evicted whole blocks", COMPLETIONS, {"prompt": whole})
    await ask("evicted prompt again", CHAT, chat(first))
    await recorder.reset()
    await ask("first step after the reset", CHAT, chat(text("reset", 20)))
    await ask("prompt of before the reset", CHAT, chat(first))
    await ask("prompt of before the reset again", CHAT, chat(first))
    await recorder.restart()
    await ask("prompt of before the restart", CHAT, chat(first))
    await ask("prompt of before the restart again", CHAT, chat(first))
    await ask("longer prompt", CHAT, chat(first + text("three", 60)))


async def main(file: Path) -> None:
    """Start an engine with a small cache, and write the recording."""
    arguments = ("--kv-cache-memory-bytes", str(BLOCKS * BLOCK_TOKENS * 512), "--max-model-len", str(LONGEST_PROMPT))
    with TemporaryDirectory(prefix="dualmap-") as name, zmq.asyncio.Context() as context:
        directory = Path(name)
        await asyncio.to_thread(make_model, directory / "model")
        engine = Vllm(directory / "model", directory=directory, name="vllm", arguments=arguments)
        with context.socket(zmq.SUB) as events:
            events.subscribe(b"")
            events.connect(f"tcp://{engine.host}:{engine.events_port}")
            try:
                await engine.start()
                async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/version") as response:
                    version = (await response.json())["version"]
                recorder = Recorder(engine, events)
                await scenario(recorder)
            finally:
                await engine.stop()
    engine_of = {"engine": f"vLLM {version}", "command": COMMAND, "block_tokens": BLOCK_TOKENS, "blocks": BLOCKS}
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in recorder.steps)
    await asyncio.to_thread(file.write_text, f'{json.dumps(engine_of)[:-1]}, "steps": [\n{steps}\n]}}\n')


if __name__ == "__main__":
    if PYTHON is None:
        sys.exit("DUALMAP_VLLM_PYTHON does not name the Python of a vLLM installation; `make vllm` installs vLLM")
    default = Path(__file__).parents[1] / "tests/core/engines/recorded/vllm_kv_events.json"
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else default))
