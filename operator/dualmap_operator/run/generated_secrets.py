"""Generates the content of Secrets while this operator leads, and replaces certificates in time.

The chart creates the Secrets without content. The operator may read and patch these Secrets only; it cannot create or
list Secrets. ``act.credentials`` has the contents.
"""

import asyncio
import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from dualmap_edge.logs import get_logger
from dualmap_operator.act import credentials
from dualmap_operator.act.credentials import Content
from dualmap_operator.api import Api, collection_path
from dualmap_operator.errors import ApiError, ConflictError
from dualmap_operator.settings import GeneratedSecret, SecretKind

# How soon an emptied Secret has new content, and a certificate of an outdated authority is replaced.
CHECK_S: Final = 30.0
_RETRY_S: Final = 2.0


class GeneratedSecrets:
    """Keeps the contents of ``secrets`` complete and valid.

    ``namespace`` is the operator's own. ``server`` is the Service there, for whose names a server's certificate is.
    """

    def __init__(
        self, api: Api, secrets: Sequence[GeneratedSecret], *, namespace: str, server: str, now: Callable[[], datetime]
    ) -> None:
        self._api = api
        # The authority signs the others.
        self._secrets = sorted(secrets, key=lambda each: each.kind is not SecretKind.AUTHORITY)
        self._namespace = namespace
        self._server = server
        self._now = now
        self._failed: dict[GeneratedSecret, str] = {}
        self._log = get_logger(__name__)

    async def run(self) -> None:
        """Check the Secrets again and again, without end."""
        while True:
            complete = await self.check()
            await asyncio.sleep(CHECK_S if complete else _RETRY_S)

    async def check(self) -> bool:
        """Generate what is missing or outdated; return whether every Secret is complete. Logs each failure once."""
        signer: Content | None = None
        for secret in self._secrets:
            if signer is None and secret.kind in (SecretKind.SERVER, SecretKind.CLIENT):
                continue  # Without an authority; its failure is logged.
            try:
                content = await self._check_one(secret, signer)
            except ApiError as error:
                self._note_failure(secret, error)
                continue
            self._failed.pop(secret, None)
            if secret.kind is SecretKind.AUTHORITY:
                signer = content
        return not self._failed

    async def _check_one(self, secret: GeneratedSecret, signer: Content | None) -> Content:
        """Return the Secret's content after this check; raises ApiError."""
        namespace = secret.namespace or self._namespace
        found = await self._api.request("GET", f"{collection_path('v1', 'Secret', namespace)}/{quote(secret.name)}")
        before = _content(found)
        content = self._wanted(secret, before, signer)
        if content.items() <= before.items():
            return content
        metadata = {
            "namespace": namespace,
            "name": secret.name,
            # The write fails if another client wrote the Secret in the meantime.
            "resourceVersion": found.get("metadata", {}).get("resourceVersion"),
        }
        data = {key: base64.b64encode(value).decode() for key, value in content.items()}
        await self._api.merge({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        self._log.info("Generated Secret content", kind=secret.kind, namespace=namespace, name=secret.name)
        return content

    def _wanted(self, secret: GeneratedSecret, content: Content, signer: Content | None) -> Content:
        now = self._now()
        if secret.kind is SecretKind.AUTHORITY:
            return credentials.authority(content, now)
        if secret.kind is SecretKind.REDIS:
            return credentials.redis(content)
        if secret.kind is SecretKind.HASH:
            return credentials.hash_key(content)
        assert signer is not None
        names = self._server_names() if secret.kind is SecretKind.SERVER else [secret.name]
        return credentials.certificate(content, signer, secret.kind, names, now)

    def _server_names(self) -> list[str]:
        within = f"{self._server}.{self._namespace}"
        return [self._server, within, f"{within}.svc", f"{within}.svc.cluster.local"]

    def _note_failure(self, secret: GeneratedSecret, error: ApiError) -> None:
        words = str(error)
        if self._failed.get(secret) != words and not isinstance(error, ConflictError):
            self._log.warning("Generating Secret content failed, retrying", kind=secret.kind, error=words)
        self._failed[secret] = words


def _content(secret: dict[str, Any]) -> dict[str, bytes]:
    """Return the Secret's values by key, without those that are not base64."""
    content = {}
    for key, value in (secret.get("data") or {}).items():
        try:
            content[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError, TypeError):
            continue
    return content
