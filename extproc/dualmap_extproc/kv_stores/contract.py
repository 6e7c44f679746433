"""The interface between lookups and the clients of stores."""

from array import array
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dualmap.kv_store.view import Chunk


class StoreError(Exception):
    """A question that a store did not answer as documented; the text says which store and why."""


class Question(NamedTuple):
    """What a store is asked for: the chunks ``keys`` of the prompt with the token ids ``ids``.

    ``chunks`` are the keys of all full chunks of the prompt, in order. ``salt`` is the prompt's ``cache_salt``.
    """

    keys: tuple[str, ...]
    chunks: tuple[str, ...]
    ids: "array[int]"
    salt: str = ""


class StoreClient(Protocol):
    """A client of one store. Every answer has a bounded size; the caller sets the deadline."""

    async def ask(self, question: Question) -> Mapping[str, Chunk]:
        """Return what is known of the question's chunks, by key; missing chunks may be left out.

        Raises StoreError.
        """
        ...

    async def close(self) -> None:
        """Close open connections."""
        ...


def host_of(endpoint: str) -> str:
    """Return the host in ``host:port`` or ``[host]:port``; the text itself without a port."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        return endpoint
    return host.removeprefix("[").removesuffix("]")
