"""Tests of ``dualmap trace`` on recordings of real routers: figures agree with the clients' answers; files merge."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dualmap_cli.main import main
from dualmap_extproc.envoy.config.settings import Mode
from dualmap_sim.recordings.errors import NotARecording
from dualmap_sim.recordings.reader import Reading
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import chat, document, prompt_of
from harness.stack import Engine
from harness.waiting import until

SYSTEM = prompt_of(8, seed="system")


def trace(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def shown(path: Path) -> dict[str, Any]:
    figures = json.loads(trace("show", path, "--json"))
    assert isinstance(figures, dict)
    return figures


def usage_of(reply: Reply) -> dict[str, Any]:
    """Return the usage of an answer, whether it is streamed or not."""
    bodies = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line.startswith((b"data: {", b"{"))]
    (usage,) = (usage for body in bodies if (usage := json.loads(body).get("usage")))
    assert isinstance(usage, dict)
    return usage


def question(text: str, **fields: Any) -> dict[str, Any]:
    return chat("qwen", SYSTEM + text, max_tokens=5, session_id=text[:1], **fields)


async def wait_until_recorded(folder: Path, count: int) -> None:
    async def there() -> bool:
        try:
            return len(list(Reading([folder]).requests())) >= count
        except NotARecording:
            return False

    await until(there, f"{count} requests are in {folder}")


async def test_recordings_of_two_routers_show_what_clients_saw_and_merge(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with Engine(directory=tmp_path, name="engine", arguments=("--speed", "100")) as engine:
        pools = {"qwen": document("qwen", [engine.member])}
        async with Deployment(
            pools, mode=Mode.STREAMED, directory=tmp_path / "a", router_arguments=("--record", str(first))
        ) as one:
            replies = [
                await one.ask(question("a first question")),
                await one.ask(question("a second question", **streamed)),
                await one.ask(question("b third question", **streamed)),
            ]
            assert {reply.status for reply in replies} == {200}
            assert (await one.ask(chat("nobody"))).status == 404
            await wait_until_recorded(first, len(replies))
            # The router still writes.
            live = shown(first)
            second.mkdir()
            shutil.copy(first / "key", second / "key")
            async with Deployment(
                pools, mode=Mode.STREAMED, directory=tmp_path / "b", router_arguments=("--record", str(second))
            ) as other:
                replies.append(await other.ask(question("a question to another router")))
                assert replies[-1].status == 200
                await wait_until_recorded(second, 1)

    check_figures(replies, live, first)
    check_merged(first, second, tmp_path)
    (hash_key,) = await asyncio.to_thread(lambda: list((tmp_path / "a").glob("*.key")))
    check_import(first, hash_key, tmp_path)


def check_figures(replies: list[Reply], live: dict[str, Any], first: Path) -> None:
    """Compare the figures of the first router's recording with the answers to its clients, the first three ones.

    A line lacks the usage if Envoy reports it late, on a slow machine.
    """
    figures, requests = shown(first), list(Reading([first]).requests())
    for name in ("requests", "pools", "prompt_tokens", "output_tokens", "ttft_s", "outcomes"):
        assert live[name] == figures[name], name
    assert figures["damaged"] == []
    assert (figures["requests"], figures["sample"], figures["pools"]) == (3, 1.0, ["llm/qwen"])
    assert figures["outcomes"] == {"ok": 3, "engine_error": 0, "client_gone": 0, "refused": 0}
    measured = [
        usage_of(reply)
        for reply, request in zip(replies, requests, strict=False)
        if request.output_tokens is not None and request.cached_tokens is not None
    ]
    if measured:
        prompts = [usage["prompt_tokens"] for usage in measured]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in measured]
        outputs = [usage["completion_tokens"] for usage in measured]
        assert figures["hit_rate"] == sum(cached) / sum(prompts)
        assert figures["output_tokens"]["mean"] == sum(outputs) / len(outputs)
    if len(measured) == len(requests):
        assert figures["prompt_tokens"]["mean"] == sum(prompts) / len(prompts)
    assert figures["reuse_at_best"] > 0.5
    assert (figures["sessions"], figures["unrouted"]) == (2, 1)
    assert 0 < figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"]
    assert [each["id"] for each in figures["members"]] == ["engine"]


def check_merged(first: Path, second: Path, folder: Path) -> None:
    """Check that equal prompts have equal hashes in both recordings."""
    merged, exported = folder / "merged.jsonl.gz", folder / "trace.jsonl"
    trace("merge", first, second, first, "-o", merged)
    both = shown(merged)
    assert (both["requests"], both["sessions"]) == (4, 2)
    assert both["reuse_at_best"] > shown(first)["reuse_at_best"]
    assert both["hot_prefixes"][0]["requests"] == 4
    trace("export", merged, "--format", "mooncake", "-o", exported)
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert len(lines) == 4
    assert {line["hash_ids"][0] for line in lines} == {0}


def check_import(first: Path, hash_key: Path, folder: Path) -> None:
    """Check that a logged request has the hashes of its recording."""
    log, imported, joined = folder / "log.jsonl", folder / "imported.jsonl", folder / "joined.jsonl"
    log.write_text(json.dumps({"timestamp": 1, "request": question("a first question"), "response": {}}) + "\n")
    trace("import", log, "--format", "openai", "-o", imported, "--key", first / "key", "--hash-key-file", hash_key)
    trace("merge", first, imported, "-o", joined)
    requests = list(Reading([joined]).requests())
    assert requests[0].blocks == requests[1].blocks
