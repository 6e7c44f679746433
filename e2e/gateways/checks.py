"""Checks of traffic through a gateway whose picker is DualMap: the same for every gateway."""

import json

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateways.site import METRICS_PORT, MODEL, Site
from harness.clients import Reply, http1, http2, sha256
from harness.deployment import CHAT
from harness.event_streams import check_event_stream
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, Upstream
from harness.waiting import until

DESTINATION = "x-gateway-destination-endpoint"
PREFILLER = "x-prefiller-host-port"
LARGE_BYTES = 3_000_000
_JSON = {"content-type": "application/json"}
_SERVES_WITHIN_S = 60.0


class Gateway:
    """The address of a gateway that leads to a site's pool."""

    def __init__(self, site: Site, host: str, port: int) -> None:
        self.site = site
        self.host = host
        self.port = port
        self.url = f"http://{host}:{port}"

    async def ask(self, content: str, **headers: str) -> Reply:
        """Send a request on a new connection; an underscore in a keyword is a hyphen in the header's name."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await http1(self.url + CHAT, body=chat(content), headers={**_JSON, **named})

    async def until_serving(self) -> None:
        """Wait until the gateway has its configuration and the picker's picks."""

        async def serves() -> bool:
            try:
                return (await self.ask("first")).status == 200
            except aiohttp.ClientError:
                return False

        await until(serves, f"{self.url} serves", timeout_s=_SERVES_WITHIN_S)

    def served_by(self, reply: Reply) -> Upstream:
        """Return the engine that served a reply; the reply must be a success."""
        assert reply.status == 200, f"{reply.status} {reply.body[:400]!r}"
        return self.site.engines[reply.headers[ENGINE_HEADER]]

    async def check_picks(self, *, requests: int = 12) -> None:
        """Requests reach the first endpoint of the picker's list, and all engines get requests."""
        used = set()
        for number in range(requests):
            engine = self.served_by(await self.ask(f"prompt {number}"))
            picked = engine.received[-1].headers[DESTINATION].split(",")
            assert picked[0] == engine.endpoint
            used.add(engine.name)
        assert used == set(self.site.engines)

    async def check_forged_destination(self) -> None:
        """The picker replaces a destination header from the client."""
        engine = self.served_by(await self.ask("forged", x_gateway_destination_endpoint="10.244.255.250:8000"))
        assert engine.received[-1].headers[DESTINATION].split(",")[0] == engine.endpoint

    async def check_large_bodies(self) -> None:
        """Bodies of 3 MB arrive complete: with a length, with chunks, and by HTTP/2."""
        body = chat("x" * LARGE_BYTES)
        url = self.url + CHAT
        replies = (
            await http1(url, body=body, headers=_JSON),
            await http1(url, body=body, headers=_JSON, chunk_bytes=100_000),
            await http2(self.port, host=self.host, path=CHAT, body=body, headers=_JSON),
        )
        for reply in replies:
            self.served_by(reply)
            assert reply.headers[DIGEST_HEADER] == sha256(body)

    async def check_trailers(self) -> None:
        """The body of a request with trailers arrives once and complete."""
        for number in range(5):
            body = chat(f"trailers {number}" + "y" * 40_000 * number)
            reply = await http2(
                self.port, host=self.host, path=CHAT, body=body, headers=_JSON, trailers=[("x-checksum", "abc")]
            )
            self.served_by(reply)
            assert reply.headers[DIGEST_HEADER] == sha256(body)

    async def check_event_stream(self) -> None:
        """Each event of a stream arrives before the engine sends the next event."""
        await check_event_stream(list(self.site.engines.values()), self.url + CHAT, chat("stream", stream=True))

    async def check_prefills(self) -> None:
        """Engines that decode get the address of the one that prefills: a site with ``ROLES`` and ``PREFILLS``."""
        prefiller, *decoders = self.site.engines.values()
        served = [self.served_by(await self.ask(f"{number} " + "story " * 400)) for number in range(12)]
        assert all(each in decoders for each in served)
        assert {each.received[-1].headers[PREFILLER] for each in served} == {prefiller.endpoint}
        short = self.served_by(await self.ask("Hi", x_prefiller_host_port="10.244.255.250:8000"))
        assert PREFILLER not in short.received[-1].headers
        assert prefiller.received == []

    async def check_dead_first_pick(self) -> None:
        """If the first endpoint of the list refuses connections, the gateway uses the second endpoint."""
        # The prompt is long enough to be cached, so that the picker picks the same engine again.
        prompt = "fallback " * 500
        dead = self.served_by(await self.ask(prompt))
        await dead.stop()
        try:
            alive = self.served_by(await self.ask(prompt))
        finally:
            await dead.start()
        assert alive is not dead
        first, *others = alive.received[-1].headers[DESTINATION].split(",")
        assert first == dead.endpoint, "the picker itself avoided the dead engine, so this test shows nothing"
        assert alive.endpoint in others


def chat(content: str, **fields: object) -> bytes:
    """Return the body of a chat request for the site's model."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}).encode()


async def metric(address: str, name: str) -> float:
    """Return the sum of a metric's samples on a picker's metrics page."""
    page = await http1(f"http://{address}:{METRICS_PORT}/metrics")
    families = text_string_to_metric_families(page.body.decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
