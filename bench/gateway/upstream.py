"""The engine process: engines that cost almost nothing and answer JSON at once, or server-sent events at a fixed pace.

``python -m bench.gateway.upstream COUNT`` listens on COUNT free ports of 127.0.0.1 and prints the ports in its ready
line. A request's header ``x-bench-chunks`` sets the number of events; 0 requests JSON. Every engine has a metrics page,
which pickers read once a second: the families that they use, and as many others as vLLM has.
"""

import asyncio
import json
import sys
from typing import cast

EVENT_EVERY_S = 0.002
_USAGE = {"prompt_tokens": 256, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 128}}
_TOKEN = json.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " word"}}]})
_LAST = json.dumps({"object": "chat.completion.chunk", "choices": [], "usage": _USAGE})
_ANSWER = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "yes"}}], "usage": _USAGE})


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_ANSWER),
    _ANSWER.encode(),
)
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = _chunk(b"data: %s\n\n" % _TOKEN.encode())
_END = _chunk(b"data: %s\n\ndata: [DONE]\n\n" % _LAST.encode()) + b"0\r\n\r\n"
_GET_METRICS = b"GET /metrics "
_GAUGES = (
    "process_start_time_seconds 1.795e+09",
    'vllm:num_requests_running{engine="0",model_name="bench"} 0.0',
    'vllm:num_requests_waiting{engine="0",model_name="bench"} 0.0',
    'vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.0',
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="62500"} 1.0',
)
# A page of vLLM 0.32.0 has 716 lines with 59 KB.
_HISTOGRAMS, _BUCKETS = 28, 20
# No prompt of ``prompts`` contains these bytes.
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


def metrics_page() -> bytes:
    """Return the answer to a request for the metrics, in Prometheus' text format."""
    lines = []
    for gauge in _GAUGES:
        name = gauge.partition("{")[0].partition(" ")[0]
        lines += [f"# HELP {name} A gauge.", f"# TYPE {name} gauge", gauge]
    for number in range(_HISTOGRAMS):
        name, labels = f"vllm:bench_{number}_seconds", 'engine="0",model_name="bench"'
        lines += [f"# HELP {name} A histogram.", f"# TYPE {name} histogram"]
        bounds = (*(f"{bound}.0" for bound in range(1, _BUCKETS)), "+Inf")
        lines += [f'{name}_bucket{{{labels},le="{bound}"}} 0.0' for bound in bounds]
        lines += [f"{name}_count{{{labels}}} 0.0", f"{name}_sum{{{labels}}} 0.0"]
    page = "\n".join((*lines, "")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page)


_METRICS = metrics_page()


class Engine(asyncio.Protocol):
    """One keep-alive connection. Requests arrive one after another, as Envoy sends them.

    They have a content length, or in FULL_DUPLEX_STREAMED the chunked encoding, of which only the end is read.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._head = b""
        self._left_bytes = 0
        self._chunked = False
        self._tail = b""
        self._events_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._events_left = 0

    def data_received(self, data: bytes) -> None:
        if not self._left_bytes and not self._chunked:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            if head.startswith(_GET_METRICS):
                self._transport.write(_METRICS)
                return
            head = head.lower()
            self._events_left = _number(head, b"\r\nx-bench-chunks: ")
            self._left_bytes = _number(head, b"\r\ncontent-length: ")
            self._chunked = b"\r\ntransfer-encoding: chunked" in head
            data = body
        if self._chunked:
            self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
            self._chunked = self._tail != _END_OF_CHUNKS
            if not self._chunked:
                self._tail = b""
                self._answer()
            return
        self._left_bytes -= len(data)
        if not self._left_bytes:
            self._answer()

    def _answer(self) -> None:
        if not self._events_left:
            self._transport.write(_JSON)
            return
        self._transport.write(_SSE_HEAD)
        self._send_event()

    def _send_event(self) -> None:
        self._events_left -= 1
        if self._events_left <= 0:
            self._transport.write(_END)
            return
        self._transport.write(_EVENT)
        asyncio.get_running_loop().call_later(EVENT_EVERY_S, self._send_event)


def _number(head: bytes, key: bytes) -> int:
    at = head.find(key)
    return int(head[at + len(key) :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def main(count: int) -> None:
    """Serve until the process is killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(count)]
    ports = (server.sockets[0].getsockname()[1] for server in servers)
    named = " ".join(f"engine_{number}=127.0.0.1:{port}" for number, port in enumerate(ports))
    print(f"dualmap bench-upstream ready {named}", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
