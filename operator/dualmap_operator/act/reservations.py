"""Reserves model names for namespaces, in the ConfigMap that operator and routers read.

``dualmap.objects.reservations`` describes the ConfigMap's content. The chart creates the ConfigMap, and an
administrator may edit it at any time. The operator only adds names.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from dualmap.objects.pods import mapping_in, text_in
from dualmap.objects.reservations import CONFIG_MAP, names_in, names_text, read_reservations
from dualmap_operator.api import Api
from dualmap_operator.errors import ApiError

NAMESPACE_BYTES: Final = 65_536
"""The maximum size of one namespace's names, so that one namespace cannot fill the ConfigMap (1 MiB)."""


class ReservationWriter:
    """Adds model names to the ConfigMap in ``namespace``. All reconcilers share one writer."""

    def __init__(self, api: Api, *, namespace: str) -> None:
        self._api = api
        self._metadata = {"namespace": namespace, "name": CONFIG_MAP}
        # Pools that start at the same time would otherwise conflict with each other.
        self._turn = asyncio.Lock()

    async def reserve(self, namespace: str, names: Sequence[str]) -> None:
        """Reserve ``names`` for ``namespace``, except reserved names.

        Raises ConflictError if the ConfigMap has changed at the same time, and ApiError for all other failures.
        """
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata}
        where = f"ConfigMap {self._metadata['namespace']}/{CONFIG_MAP}"
        async with self._turn:
            found = await self._api.find(document)
            if found is None:
                raise ApiError(f"{where} does not exist; install it with the chart or with manifests/install.yaml")
            data = mapping_in(found, "data")
            reserved = read_reservations(data)
            added = [name for name in names if name not in reserved]
            if not added:
                return
            text = names_text((*names_in(text_in(data, namespace)), *added))
            if len(text.encode()) > NAMESPACE_BYTES:
                raise ApiError(
                    f"{where}: the model names of namespace {namespace} exceed {NAMESPACE_BYTES} bytes, so new names "
                    "are not reserved; remove unused names from the ConfigMap"
                )
            version = text_in(mapping_in(found, "metadata"), "resourceVersion")
            metadata = {**self._metadata, "resourceVersion": version}
            await self._api.merge({**document, "metadata": metadata, "data": {namespace: text}})
