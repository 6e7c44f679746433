"""Tests of the Kubernetes API client's cancelled connections over TLS."""

import asyncio
import base64
import gc
import json
import ssl
import warnings
from pathlib import Path

from aiohttp import web

from certificates import Authority, write_pair
from dualmap_edge.kube.client import KubeClient
from web_server import WebServer

REQUESTS = 8
# The pauses range from the first iterations of an event loop to completed handshakes, on idle and on busy machines.
PAUSES_S = [step * 0.002 for step in range(20)]


async def test_kube_client_cancelled_connect_leaves_no_connection(tmp_path: Path) -> None:
    authority = Authority()
    pair = write_pair(tmp_path / "tls", authority.pair())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
    async with WebServer(web.Application(), ssl_context=context) as server:
        kubeconfig = tmp_path / "kubeconfig"
        write_kubeconfig(kubeconfig, f"https://127.0.0.1:{server.port}", authority)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for pause_s in PAUSES_S:
                # Each attempt runs in its own event loop, because a connection can leak at the loop's end.
                await asyncio.to_thread(asyncio.run, give_up(kubeconfig, pause_s))
            gc.collect()
        assert [str(each.message) for each in said if each.category is ResourceWarning] == []


async def give_up(kubeconfig: Path, pause_s: float) -> None:
    """Begin requests, cancel the requests after a pause, and close the client."""
    client = await KubeClient.connect(kubeconfig)
    requests = [asyncio.create_task(client.request("GET", "/api/v1/pods")) for _ in range(REQUESTS)]
    await asyncio.sleep(pause_s)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await client.close()


def write_kubeconfig(path: Path, server: str, authority: Authority) -> None:
    trusted = base64.b64encode(authority.pem).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server, "certificate-authority-data": trusted}}],
        "users": [{"name": "me", "user": {}}],
    }
    path.write_text(json.dumps(config))
