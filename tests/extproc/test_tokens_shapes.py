"""Token ids of requests of many shapes: vLLM's renderer, which a recording or the real program answers, and the files.

The recording has the answers of ``vllm-rs render`` of vLLM 0.33.0 for the tokenizer of ``tokenizer_files``. With the
path of that program in the environment variable DUALMAP_VLLM_RS, the program itself answers as well.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from dualmap.prompts.prompt import read_prompt
from dualmap_extproc.app.tokenize import tokenize
from dualmap_extproc.tokens.files import FilesTokenizer
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.renderer import _PATHS, Renderer, RendererFault
from extproc.request_shapes import SHAPES, Shape
from extproc.tokenizer_files import write_tokenizer
from ports import reserved_port
from waiting import until

RECORDED: Final = json.loads((Path(__file__).parent / "recorded" / "vllm_rs_render.json").read_text())
PROGRAM: Final = os.environ.get("DUALMAP_VLLM_RS", "")
CONFIG: Final = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512}
# Without its parser of tool calls, the renderer refuses requests with tools.
OPTIONS: Final = ("--served-model-name", "m", "--tool-call-parser", "hermes", "--reasoning-parser", "none")
# vllm-rs joins the text parts of a message without line feeds. vLLM's server in Python puts a line feed between them.
DIFFERENT: Final = {"text parts"}
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace(" ", "_"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / "small")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def files(folder: Path) -> FilesTokenizer:
    return FilesTokenizer(str(folder))


async def outcome(url: str, shape: Shape) -> list[int] | str:
    """Return the ids that the router gets for a shape, or the kind of its failure."""
    renderer = Renderer()
    try:
        return (await renderer.ids(url, (json.dumps(shape.body).encode(),), shape.api)).tolist()
    except RendererFault:
        return "fault"
    except UnsupportedRequest:
        return "unsupported"
    finally:
        await renderer.close()


@pytest.fixture
async def recorded() -> AsyncIterator[str]:
    """Serve the recorded answers; return the URL."""
    answers = {(_PATHS[shape.api], json.dumps(shape.body)): RECORDED[shape.name] for shape in SHAPES}

    async def answer(request: web.Request) -> web.Response:
        recorded: Mapping[str, Any] = answers[request.path, await request.text()]
        return web.json_response(recorded.get("body"), status=recorded["status"])

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    server = TestServer(application)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@each_shape
async def test_renderer_and_files_have_the_same_ids(shape: Shape, recorded: str, files: FilesTokenizer) -> None:
    rendered = await outcome(recorded, shape)
    try:
        own = files.ids(shape.body, shape.api).tolist()
    except UnsupportedRequest:
        return
    if isinstance(rendered, list):
        assert (own == rendered) is (shape.name not in DIFFERENT)


def test_recording_covers_most_shapes() -> None:
    assert RECORDED.keys() == {shape.name for shape in SHAPES}
    assert sum(each["status"] == 200 for each in RECORDED.values()) >= 30


@pytest.mark.parametrize("name", ["responses text", "messages with tools"])
async def test_api_that_the_renderer_lacks_is_a_fault(name: str, recorded: str) -> None:
    (shape,) = (each for each in SHAPES if each.name == name)
    assert await outcome(recorded, shape) == "fault"


def ids_in(answer: Any) -> list[list[int]]:
    """Return the ids of each prompt in an answer."""
    prompts = answer if isinstance(answer, list) else [answer] if answer else []
    return [each["token_ids"] for each in prompts]


def test_renderer_ignores_ids_of_a_client_which_the_router_sees() -> None:
    (shape,) = (each for each in SHAPES if each.name == "client's ids beside messages")
    assert ids_in(RECORDED[shape.name]["body"]) == ids_in(RECORDED["one turn"]["body"])
    assert read_prompt(shape.body, shape.api).names_ids


@pytest.fixture
async def program(folder: Path, tmp_path: Path) -> AsyncIterator[str]:
    """Run the real renderer; return its URL."""
    port = reserved_port()
    command = (PROGRAM, "render", str(folder), *OPTIONS, "--port", str(port))
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        assert process.returncode is None, (tmp_path / "log").read_text()
        async with aiohttp.ClientSession() as session:
            try:
                await session.get(url)
            except aiohttp.ClientError:
                return False
        return True

    try:
        await until(answers)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.skipif(not PROGRAM, reason="DUALMAP_VLLM_RS is not set")
async def test_program_answers_as_recorded(program: str) -> None:
    async with aiohttp.ClientSession() as session:
        for shape in SHAPES:
            async with session.post(program + _PATHS[shape.api], json=shape.body) as answer:
                body = await answer.json() if answer.status == 200 else None
                recorded = RECORDED[shape.name]
                assert answer.status == recorded["status"], shape.name
                assert ids_in(body) == ids_in(recorded.get("body")), shape.name


@pytest.mark.skipif(not PROGRAM, reason="DUALMAP_VLLM_RS is not set")
async def test_command_compares_files_with_the_program(program: str, folder: Path, tmp_path: Path) -> None:
    pool, request = tmp_path / "pool.yaml", tmp_path / "request.json"
    for source in (f"{{source: Renderer, url: '{program}'}}", f"{{source: Files, path: {folder}}}"):
        pool.write_text(
            "apiVersion: serving.dualmap.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: qwen}\n"
            f"spec: {{model: {{name: m}}, engine: {{type: vLLM, tokenizer: {source}}}}}\n"
        )
        for name in ("several turns", "tools", "call and result", "non-Latin text", "prompt"):
            (shape,) = (each for each in SHAPES if each.name == name)
            request.write_text(json.dumps(shape.body))
            arguments = ["--pool", str(pool), "--request", str(request), "--json"]
            result = await asyncio.to_thread(CliRunner().invoke, tokenize, arguments)
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["tokens"] == len(ids_in(RECORDED[name]["body"])[0])
