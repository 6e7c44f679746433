"""Tests of the chart's two scripts with the pods' command lines: the chat request of `helm test`, and Envoy's drain."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from chart.rendering import CHART

ANSWER = {"choices": [{"message": {"content": "Hello"}}]}
DECISION = {"x-dualmap-decision": 'policy=dualmap, chosen="qwen-0"'}
ENDS_WITHIN_S = 30.0
Reply = tuple[int, Any, dict[str, str]]


@dataclass(kw_only=True)
class Peer:
    """A small server with its received requests, and its responses (status, body, headers) by path."""

    answers: dict[str, Sequence[Reply]]
    """The last response of a path is repeated."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    address: str = ""

    def answer(self, method: str, path: str, body: Any) -> Reply:
        self.asked.append((method, path, body))
        so_far = sum(1 for _, asked, _ in self.asked if asked == path)
        replies = self.answers[path]
        return replies[min(so_far, len(replies)) - 1]


@contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            read = self.rfile.read(int(self.headers.get("content-length") or 0))
            self.reply(json.loads(read) if read else None)

        def reply(self, body: Any) -> None:
            status, content, headers = peer.answer(self.command, self.path, body)
            sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(sent)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        peer.address = f"127.0.0.1:{server.server_address[1]}"
        try:
            yield peer
        finally:
            server.shutdown()
            thread.join()


class TestSmokeTest:
    def run(self, gateway: Peer, *more: str) -> "subprocess.CompletedProcess[str]":
        with serving(gateway):
            command = [sys.executable, CHART / "files" / "chat_request.py", f"--url=http://{gateway.address}", *more]
            return subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S)

    def test_smoke_test_valid_response_is_printed_with_its_decision(self) -> None:
        gateway = Peer(answers={"/v1/chat/completions": [(200, ANSWER, DECISION)]})
        done = self.run(gateway, "--model=qwen")
        assert (done.returncode, done.stderr) == (0, "")
        assert "model qwen answered 'Hello'" in done.stdout
        assert f"x-dualmap-decision: {DECISION['x-dualmap-decision']}" in done.stdout
        ((method, _, body),) = gateway.asked
        assert (method, body["model"], body["messages"][0]["role"]) == ("POST", "qwen", "user")

    def test_smoke_test_without_model_uses_first_listed_model(self) -> None:
        gateway = Peer(
            answers={
                "/v1/models": [(200, {"data": [{"id": "listed"}]}, {})],
                "/v1/chat/completions": [(200, ANSWER, DECISION)],
            }
        )
        assert self.run(gateway).returncode == 0
        assert gateway.asked[1][2]["model"] == "listed"

    def test_smoke_test_retries_while_the_pool_starts(self) -> None:
        replies: list[Reply] = [(503, {"error": {"message": "no endpoint"}}, {}), (200, ANSWER, DECISION)]
        done = self.run(Peer(answers={"/v1/chat/completions": replies}), "--model=qwen")
        assert done.returncode == 0
        assert "HTTP 503" in done.stderr
        assert "no endpoint" in done.stderr

    @pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
    def test_smoke_test_accepts_response_with_only_reasoning_text(self, key: str) -> None:
        thinking = {"choices": [{"message": {"content": None, key: "Okay, the user"}}]}
        done = self.run(Peer(answers={"/v1/chat/completions": [(200, thinking, DECISION)]}), "--model=qwen")
        assert done.returncode == 0
        assert "answered 'Okay, the user'" in done.stdout

    def test_smoke_test_retries_after_a_broken_response(self) -> None:
        replies: list[Reply] = [(200, ANSWER, {**DECISION, "content-length": "999"}), (200, ANSWER, DECISION)]
        done = self.run(Peer(answers={"/v1/chat/completions": replies}), "--model=qwen")
        assert done.returncode == 0
        assert "IncompleteRead" in done.stderr

    @pytest.mark.parametrize(
        ("reply", "said"),
        [
            ((404, {"error": {"message": "no such model"}}, {}), "HTTP 404"),
            ((200, ANSWER, {}), "the response has no header x-dualmap-decision"),
            ((200, {"choices": []}, DECISION), "the response has no text"),
            ((200, "<html>", DECISION), "is not JSON"),
            ((200, "[]", DECISION), "is not a JSON object"),
        ],
    )
    def test_smoke_test_prints_invalid_response_and_fails(self, reply: Reply, said: str) -> None:
        done = self.run(Peer(answers={"/v1/chat/completions": [reply]}), "--model=qwen", "--timeout=2")
        assert done.returncode == 1
        assert said in done.stderr
        assert "no successful answer within 2 s" in done.stderr

    def test_smoke_test_error_contains_the_unreachable_gateway(self) -> None:
        command = [sys.executable, CHART / "files" / "chat_request.py", "--url=http://127.0.0.1:9", "--timeout=1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
        assert done.returncode == 1
        assert "http://127.0.0.1:9/v1/models" in done.stderr


STATS = "/stats?filter=http.requests.downstream_rq_active"


def active(count: int) -> Reply:
    return 200, f"http.requests.downstream_rq_active: {count}\n", {}


@dataclass(frozen=True, kw_only=True)
class Drain:
    """The running drain script, and its URL for /drained."""

    process: "subprocess.Popen[str]"
    url: str

    def ended(self) -> tuple[int, str]:
        """Wait for the script's end; return the exit status and the remaining output."""
        _, said = self.process.communicate(timeout=ENDS_WITHIN_S)
        return self.process.returncode, said


class TestDrainScript:
    @pytest.fixture(name="start")
    def _start(self) -> Iterator[Callable[..., Drain]]:
        with ExitStack() as running:

            def start(admin: str, *more: str) -> Drain:
                command = [sys.executable, CHART / "files" / "envoy_drain.py", f"--admin={admin}", "--port=0", *more]
                process = running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
                running.callback(process.kill)
                assert process.stderr is not None
                ready = process.stderr.readline()
                return Drain(process=process, url=f"http://127.0.0.1:{ready.split()[-1]}/drained")

            yield start

    def test_drain_script_waits_for_open_and_new_requests(self, start: Callable[..., Drain]) -> None:
        envoy = Peer(
            answers={"/healthcheck/fail": [(200, "OK\n", {})], STATS: [active(2), active(0), active(1), active(0)]}
        )
        with serving(envoy):
            drain = start(envoy.address, "--timeout=60", "--least=0")
            assert envoy.asked == []
            drain.process.send_signal(signal.SIGTERM)
            with urllib.request.urlopen(drain.url, timeout=ENDS_WITHIN_S) as answer:
                assert answer.status == 200
            assert drain.ended() == (0, "nothing is open\n")
        assert [(method, path) for method, path, _ in envoy.asked] == [
            ("POST", "/healthcheck/fail"),
            *[("GET", STATS)] * 5,
        ]

    def test_drain_server_delays_its_response_until_sigterm(self, start: Callable[..., Drain]) -> None:
        """A request alone must not start a drain, and an early preStop call must wait."""
        envoy = Peer(answers={"/healthcheck/fail": [(200, "OK\n", {})], STATS: [active(0)]})
        with serving(envoy):
            drain = start(envoy.address, "--timeout=60", "--least=0")
            with pytest.raises(TimeoutError):
                urllib.request.urlopen(drain.url, timeout=0.5)
            assert envoy.asked == []
            drain.process.send_signal(signal.SIGTERM)
            assert drain.ended()[0] == 0

    def test_drain_script_stops_waiting_at_the_time_limit(self, start: Callable[..., Drain]) -> None:
        envoy = Peer(answers={"/healthcheck/fail": [(200, "OK\n", {})], STATS: [active(1)]})
        with serving(envoy):
            drain = start(envoy.address, "--timeout=1", "--least=0")
            drain.process.send_signal(signal.SIGTERM)
            assert drain.ended() == (0, "requests are open after 1 s\n")

    def test_drain_script_without_requests_ends_after_a_short_wait(self, start: Callable[..., Drain]) -> None:
        """Load balancers remove a terminating pod with a delay."""
        envoy = Peer(answers={"/healthcheck/fail": [(200, "OK\n", {})], STATS: [active(0)]})
        with serving(envoy):
            drain = start(envoy.address, "--timeout=60", "--least=60")
            drain.process.send_signal(signal.SIGTERM)
            give_up_s = time.monotonic() + ENDS_WITHIN_S
            while ("GET", STATS, None) not in envoy.asked and time.monotonic() < give_up_s:
                time.sleep(0.05)
            with pytest.raises(TimeoutError):
                urllib.request.urlopen(drain.url, timeout=1.5)
            assert envoy.asked[0] == ("POST", "/healthcheck/fail", None)

    def test_drain_script_retries_a_single_failed_envoy_request(self, start: Callable[..., Drain]) -> None:
        refusal: Reply = (503, "busy", {})
        envoy = Peer(
            answers={
                "/healthcheck/fail": [refusal, (200, "OK\n", {})],
                STATS: [active(1), refusal, refusal, active(1), refusal, active(0)],
            }
        )
        with serving(envoy):
            drain = start(envoy.address, "--timeout=60", "--least=0")
            drain.process.send_signal(signal.SIGTERM)
            status, said = drain.ended()
        assert (status, said.splitlines()[-1]) == (0, "nothing is open")
        assert [path for _, path, _ in envoy.asked] == ["/healthcheck/fail"] * 2 + [STATS] * 7

    def test_drain_script_ends_if_envoy_has_stopped(self, start: Callable[..., Drain]) -> None:
        drain = start("127.0.0.1:9", "--timeout=60")
        drain.process.send_signal(signal.SIGTERM)
        status, said = drain.ended()
        assert status == 0
        assert "Envoy at 127.0.0.1:9 does not answer" in said

    def test_drain_server_returns_404_for_unknown_path(self, start: Callable[..., Drain]) -> None:
        drain = start("127.0.0.1:9", "--timeout=60")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(drain.url.replace("/drained", "/"), timeout=ENDS_WITHIN_S)
        refused.value.close()
        assert refused.value.code == 404
