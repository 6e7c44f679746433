"""KV of prompts that moves between engines: the request field ``kv_transfer_params``, and the prompts that are kept.

The fields and the flow are those of vLLM's NIXL connector (docs.vllm.ai, "NixlConnector Usage Guide"). A prefiller
answers with the parameters of the KV that it keeps. The decode engine sends them back to the prefiller, and gets the
KV. ``kv_handover.py`` carries these messages over HTTP, where vLLM uses a side channel and RDMA.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, Self

from dualmap_sim.errors import ApiError
from dualmap_sim.openai_api import BAD_REQUEST

FIELD: Final = "kv_transfer_params"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteKv:
    """The KV of a prompt in another engine, as the prefiller described it."""

    engine_id: str
    request_id: str
    block_ids: tuple[int, ...]
    host: str
    port: int

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> Self:
        """Return the values of ``kv_transfer_params`` or of a request for KV. Raises ApiError 400."""
        groups = fields.get("remote_block_ids")
        blocks = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise _invalid("remote_block_ids", "a list with one list of integers")
        port = fields.get("remote_port")
        if type(port) is not int or not 0 < port < 65_536:
            raise _invalid("remote_port", "a port")
        texts = {}
        for name in ("remote_engine_id", "remote_request_id", "remote_host"):
            text = fields.get(name)
            if not isinstance(text, str) or not text:
                raise _invalid(name, "a text")
            texts[name] = text
        return cls(
            engine_id=texts["remote_engine_id"],
            request_id=texts["remote_request_id"],
            block_ids=tuple(blocks),
            host=texts["remote_host"],
            port=port,
        )

    @property
    def fields(self) -> dict[str, object]:
        """The values as a JSON object."""
        return {
            "remote_block_ids": [list(self.block_ids)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
        }


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a request says about its KV: whether another engine decodes it, and where its prompt's KV is."""

    remote_decode: bool = False
    remote_prefill: RemoteKv | None = None


def read_transfer(body: Mapping[str, object]) -> Transfer:
    """Return the value of ``kv_transfer_params`` in a body. Raises ApiError 400."""
    fields = body.get(FIELD)
    if fields is None:
        return Transfer()
    if not isinstance(fields, dict):
        raise _invalid("", "an object")
    remote = RemoteKv.read(fields) if fields.get("do_remote_prefill") else None
    return Transfer(remote_decode=bool(fields.get("do_remote_decode")), remote_prefill=remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    number: str
    block_ids: tuple[int, ...]


class KeptPrompts:
    """The prompts whose KV an engine keeps until another engine has pulled it.

    ``release`` frees the memory of a request of the engine model.
    """

    def __init__(self, engine_id: str, *, block_tokens: int, release: Callable[[str], None]) -> None:
        self._engine_id = engine_id
        self._block_tokens = block_tokens
        self._release = release
        self._blocks = count(1)
        self._kept: dict[str, _Kept] = {}

    def keep(self, number: str, request_id: str, prompt_tokens: int, *, host: str, port: int) -> RemoteKv:
        """Keep the KV of the ended request ``number``; return its parameters."""
        blocks = tuple(next(self._blocks) for _ in range(-(-prompt_tokens // self._block_tokens)))
        self._kept[request_id] = _Kept(number=number, block_ids=blocks)
        return RemoteKv(engine_id=self._engine_id, request_id=request_id, block_ids=blocks, host=host, port=port)

    def has(self, remote: RemoteKv) -> bool:
        """Return whether the engine keeps this KV. A restarted engine has another id and none of the KV."""
        kept = self._kept.get(remote.request_id)
        return kept is not None and (remote.engine_id, remote.block_ids) == (self._engine_id, kept.block_ids)

    def forget(self, request_id: str) -> None:
        """Release the KV of a request, if the engine still keeps it."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._release(kept.number)


def _invalid(name: str, accepted: str) -> ApiError:
    where = f"{FIELD}.{name}" if name else FIELD
    return ApiError(400, BAD_REQUEST, f"{where} is not {accepted}", param=where)
