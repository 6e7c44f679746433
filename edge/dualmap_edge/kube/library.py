"""An adapter of the ``kubernetes`` library, which reads the server's address, authenticates and opens connections."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

import aiohttp

from dualmap_edge.kube.errors import KubeConfigError, clipped

_UNAUTHORIZED: Final = 401
# The time in which the event loop closes a TLS connection after a cancelled handshake.
_GIVEN_UP_CLOSES_WITHIN_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The API server's address and a client's credentials, for another library that uses the same server.

    ``authorization`` is the HTTP header's value. An empty text means not set. Without ``ca_file``, the system's CAs
    apply.
    """

    server: str
    ca_file: str = ""
    verify_tls: bool = True
    certificate_file: str = ""
    key_file: str = ""
    authorization: str = ""
    proxy: str = ""


class Library:
    """The server's address, the client's credentials and its connections, from the kubernetes library."""

    def __init__(self, configuration: Any, rest: Any, kubeconfig: Path | None) -> None:
        self._configuration = configuration
        self._rest = rest
        self._kubeconfig = kubeconfig
        self._gave_up = False

    @classmethod
    async def load(cls, kubeconfig: Path | None) -> Self:
        """Read the configuration; raise KubeConfigError if it cannot be used."""
        await asyncio.to_thread(_import_library)
        from kubernetes.aio.client.rest import RESTClientObject

        configuration = await _configuration(kubeconfig)
        try:
            return cls(configuration, RESTClientObject(configuration), kubeconfig)
        except (OSError, ValueError) as error:
            raise KubeConfigError(f"the Kubernetes configuration has invalid certificates: {error}") from error

    @property
    def host(self) -> str:
        """The server's URL."""
        return str(self._configuration.host)

    async def connection(self) -> Connection:
        """Read the configuration and its tokens again and return them; raise KubeConfigError."""
        configuration = await _configuration(self._kubeconfig)
        token: str | None = await configuration.get_api_key_with_prefix("BearerToken")
        return Connection(
            server=str(configuration.host),
            ca_file=configuration.ssl_ca_cert or "",
            verify_tls=bool(configuration.verify_ssl),
            certificate_file=configuration.cert_file or "",
            key_file=configuration.key_file or "",
            authorization=(token or "").strip(),
            proxy=configuration.proxy or "",
        )

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]],
        timeout: aiohttp.ClientTimeout,
        body: object = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request and return its response with an unread body; after a 401, retry once with new credentials."""
        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        response = await self._send(method, url, body, content_type, timeout)
        if response.status != _UNAUTHORIZED:
            return response
        # A token in the kubeconfig may have been replaced, or a plugin that creates the token must run again.
        before = await self._token()
        try:
            renewed = await _configuration(self._kubeconfig)
        except KubeConfigError:
            return response
        self._configuration.api_key = renewed.api_key
        if await self._token() == before:
            return response
        response.close()
        return await self._send(method, url, body, content_type, timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()
        if self._gave_up:
            await asyncio.sleep(_GIVEN_UP_CLOSES_WITHIN_S)

    async def _send(
        self, method: str, url: str, body: object, content_type: str, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        token = await self._token()
        if token is not None:
            headers["Authorization"] = token
        try:
            answer = await self._rest.request(method, url, headers=headers, body=body, _request_timeout=timeout)
        except (asyncio.CancelledError, TimeoutError):
            self._gave_up = True
            raise
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _token(self) -> str | None:
        """Return the Authorization header; the library reads a pod's token from its file again every minute."""
        token: str | None = await self._configuration.get_api_key_with_prefix("BearerToken")
        return token


def _import_library() -> None:
    import kubernetes.aio.client.rest
    import kubernetes.aio.config  # noqa: F401  # what is wanted is that it has been imported


async def _configuration(kubeconfig: Path | None) -> Any:
    """Return the library's Configuration for the server; raise KubeConfigError if none can be used."""
    import kubernetes.aio.config
    from kubernetes.aio.client import Configuration

    config: Any = kubernetes.aio.config  # The type is Any because the library is untyped.
    configuration = Configuration()
    # No limit on connections: each watch uses one connection, and every pool may have a watch.
    configuration.connection_pool_maxsize = 0
    # The library's value of env KUBECONFIG, which may contain several files.
    location = str(kubeconfig or config.KUBE_CONFIG_DEFAULT_LOCATION)
    try:
        if _has_kubeconfig(location, config.kube_config.ENV_KUBECONFIG_PATH_SEPARATOR):
            await _load_kubeconfig(config, location, configuration)
        else:
            config.load_incluster_config(configuration)
    except config.ConfigException as error:
        raise KubeConfigError(
            f"no Kubernetes API server is configured: {error}; set KUBECONFIG to a kubeconfig, or run in a pod with a "
            "service account"
        ) from error
    return configuration


def _has_kubeconfig(location: str, separator: str) -> bool:
    """Return whether a kubeconfig exists; raise KubeConfigError if a configured file is missing."""
    files = [Path(each).expanduser() for each in location.split(separator) if each]
    if any(file.exists() for file in files):
        return True
    if files and files != [Path.home() / ".kube" / "config"]:
        raise KubeConfigError(f"kubeconfig {location} does not exist; set KUBECONFIG to an existing kubeconfig")
    return False


async def _load_kubeconfig(config: Any, location: str, configuration: object) -> None:
    try:
        await config.load_kube_config(config_file=location, client_configuration=configuration, persist_config=False)
    except Exception as error:  # the library raises any exception for a malformed file
        raise KubeConfigError(
            f"kubeconfig {location} is invalid: {clipped(str(error) or repr(error))}; give a kubeconfig with clusters, "
            "users and a current-context"
        ) from error
