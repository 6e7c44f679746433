"""Tests of ``dualmap tokenize``."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner, Result

from dualmap.prompts.api import Api
from dualmap_extproc.app.tokenize import tokenize
from dualmap_extproc.tokens.files import FilesTokenizer
from extproc.tokenizer_files import write_tokenizer

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello world"}], "temperature": 1})


class Engine(BaseHTTPRequestHandler):
    """Answers /tokenize, or a render endpoint whose path the test sets; the test sets the ids on the server."""

    def do_POST(self) -> None:
        received = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = getattr(self.server, "path", "/tokenize")
        assert self.path == path
        assert path != "/tokenize" or received.keys() == {"model", "messages"}
        field = "tokens" if path == "/tokenize" else "token_ids"
        answer = json.dumps({field: self.server.ids}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    folder = write_tokenizer(tmp_path / "tokenizer")
    return written(tmp_path, {"source": "Files", "path": str(folder)})


def written(folder: Path, tokenizer: dict[str, str]) -> Path:
    path = folder / "pool.yaml"
    spec = {"model": {"name": "m"}, "engine": {"tokenizer": tokenizer}}
    kind = {"apiVersion": "serving.dualmap.dev/v1alpha1", "kind": "InferencePool"}
    path.write_text(json.dumps({**kind, "metadata": {"name": "p", "namespace": "n"}, "spec": spec}))
    return path


def run(pool_file: Path, *options: str, body: str = BODY) -> Result:
    return CliRunner().invoke(tokenize, ["--pool", str(pool_file), "--request", "-", *options], input=body)


def test_tokenize_prints_count_time_and_cache(pool_file: Path) -> None:
    result = run(pool_file, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document.keys() == {
        *("source", "tokens", "seconds", "seconds_again", "cached_bytes", "cacheable_bytes"),
    }
    assert (document["source"], document["tokens"]) == ("Files", 18)
    assert document["cached_bytes"] == document["cacheable_bytes"] > 0
    assert run(pool_file).stdout.startswith("18 tokens from Files in ")


def test_tokenize_compares_with_an_engine(pool_file: Path, engine: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    engine.ids = [1, 5]  # type: ignore[attr-defined]
    different = run(pool_file, "--engine", url, "--json")
    assert different.exit_code == 1
    assert json.loads(different.stdout)["engine"] == {"tokens": 2, "equal": False, "first_difference": 1}
    assert "the first difference is at position 1" in run(pool_file, "--engine", url).stdout
    (folder,) = pool_file.parent.glob("tokenizer")
    engine.ids = FilesTokenizer(str(folder)).ids(json.loads(BODY), Api.CHAT).tolist()  # type: ignore[attr-defined]
    equal = run(pool_file, "--engine", url)
    assert (equal.exit_code, equal.stdout.splitlines()[-1]) == (0, "the engine's ids are equal")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages/render", {"system": "be kind", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses/render", {"input": "hi"}),
        ("/v1/completions/render", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions/render", {"messages": [], "reasoning_effort": "high"}),
        ("/v1/chat/completions/render", {"messages": [], "documents": [{"text": "a"}]}),
    ],
)
def test_engine_renders_what_its_tokenize_cannot(
    tmp_path: Path, engine: ThreadingHTTPServer, path: str, fields: dict[str, object]
) -> None:
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    engine.ids = [1, 2, 3]  # type: ignore[attr-defined]
    engine.path = path  # type: ignore[attr-defined]
    body = json.dumps({"model": "m", **fields})
    result = run(written(tmp_path, {"source": "Renderer", "url": url}), "--engine", url, body=body)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "the engine's ids are equal")


@pytest.mark.parametrize(
    ("body", "named"),
    [("{", "not JSON"), ('{"model": "x"}', "no model 'x'"), ('{"model": "m", "input": "a"}', "Renderer")],
)
def test_tokenize_refuses_a_request_in_one_line(pool_file: Path, body: str, named: str) -> None:
    result = run(pool_file, body=body)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_tokenize_refuses_a_pool_without_source(tmp_path: Path) -> None:
    result = run(written(tmp_path, {"source": "Estimate"}))
    assert (result.exit_code, "give Files or Renderer" in result.stderr) == (2, True)


def test_tokenize_refuses_an_unreadable_folder(tmp_path: Path) -> None:
    result = run(written(tmp_path, {"source": "Files", "path": str(tmp_path / "none")}))
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)


def test_tokenize_reports_an_engine_that_does_not_answer(pool_file: Path) -> None:
    result = run(pool_file, "--engine", "http://127.0.0.1:1")
    assert (result.exit_code, "no connection (Connection refused)" in result.stderr) == (2, True)
