"""A decode engine behind ``dualmap pd-proxy`` and a real Envoy, with two prefillers. All engines are simulated.

Envoy has no router here, so that a test chooses the prefillers of each request.
"""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from harness.envoy import Envoy
from harness.processes import Child, dualmap_argv
from harness.stack import Engine, PoolMember, pool_document, write_pool

ENVOY = """
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:
  - name: http
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: "/"}}
                route: {{cluster: sidecar, timeout: 0s}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: sidecar
    type: STATIC
    load_assignment:
      cluster_name: sidecar
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}
"""


class PdProxy(Child):
    """A ``dualmap pd-proxy`` on free ports of 127.0.0.1."""

    def __init__(self, engine: str, *arguments: str, directory: Path, name: str = "pd-proxy") -> None:
        argv = ["pd-proxy", "--listen", "127.0.0.1:0", "--metrics-port", "0", "--engine", f"http://{engine}"]
        super().__init__(name, dualmap_argv(*argv, *arguments), directory=directory)
        self.port = 0
        self.metrics = ""

    async def start(self) -> None:
        """Start the proxy and wait for its ready line."""
        await super().start()
        line = await self.wait_for_line(r"dualmap pd-proxy ready http=\S+:(\d+) metrics=(\S+)")
        self.port, self.metrics = int(line[1]), f"http://{line[2]}"

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.metrics}/metrics") as response:
            page = await response.text()
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels))


class PdSite:
    """The processes. ``first`` and ``second`` are the prefillers, ``decoder`` is the engine behind the proxy."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = AsyncExitStack()
        hands_over = ("--kv-transfer", "--speed", "50")
        self.first = Engine(directory=directory, name="first", arguments=hands_over)
        self.second = Engine(directory=directory, name="second", arguments=hands_over)
        self.decoder = Engine(directory=directory, name="decoder", arguments=hands_over)
        self.proxy: PdProxy
        self.envoy: Envoy

    def naming(self, *engines: Engine) -> dict[str, str]:
        """Return the headers that name these prefillers, as the router sets them."""
        endpoints = [engine.endpoint for engine in engines]
        return {"x-prefiller-host-port": endpoints[0], "x-dualmap-prefillers": ",".join(endpoints)}

    async def ask(self, prompt: str, headers: dict[str, str], **body: Any) -> tuple[str, str, dict[str, int]]:
        """Send a completion; return where its prompt was prefilled, its text, and its usage."""
        document = {"model": "qwen-model", "prompt": prompt, "max_tokens": 20, **body}
        url = f"{self.envoy.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=document, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            usage = answer["usage"]
            counts = {"prompt": usage["prompt_tokens"], **usage["prompt_tokens_details"]}
            return response.headers["x-dualmap-prefill"], answer["choices"][0]["text"], counts

    async def stream(self, prompt: str, headers: dict[str, str], *, tokens: int = 60) -> tuple[str, str]:
        """Send a streamed completion; return where its prompt was prefilled, and its text, from a complete stream."""
        document = {"model": "qwen-model", "prompt": prompt, "max_tokens": tokens, "stream": True}
        url = f"{self.envoy.url}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=document, headers=headers) as response:
            events = (await response.read()).split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            return response.headers["x-dualmap-prefill"], text

    async def heal(self) -> None:
        """Let all prefillers run."""
        for engine in (self.first, self.second):
            if engine.returncode is not None:
                await engine.start()

    async def engine_metric(self, engine: Engine, name: str, **labels: str) -> float:
        """Return the sum of an engine's metric."""
        url = f"http://{engine.endpoint}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            page = await response.text()
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    async def __aenter__(self) -> Self:
        for engine in (self.first, self.second, self.decoder):
            await self._stack.enter_async_context(engine)
        members = [PoolMember(id=e.name, address=e.host, port=e.port) for e in (self.first, self.second)]
        file = write_pool(self._directory / "prefill.json", pool_document(members, name="prefill"))
        arguments: Sequence[str] = ("--pool", str(file), "--prefill-timeout", "5s", "--continue")
        self.proxy = PdProxy(self.decoder.endpoint, *arguments, directory=self._directory)
        await self._stack.enter_async_context(self.proxy)
        self.envoy = Envoy(ENVOY.format(port=self.proxy.port), directory=self._directory)
        await self._stack.enter_async_context(self.envoy)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()
