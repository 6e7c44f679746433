"""The prefill leg of vLLM's disaggregated prefill: another engine computes a prompt and keeps its KV for this engine.

The leg is the client's request with one output token, and with ``kv_transfer_params`` that ask for a remote decode
(docs.vllm.ai, "NixlConnector Usage Guide", and its toy proxy server). The answer's ``kv_transfer_params`` say where the
KV is. They go into the request to the decode engine, unchanged. With a shared storage, neither request has
``kv_transfer_params``: the prefiller stores the KV, and the decode engine looks for it. If a prefiller fails, the next
one is asked. After the last one, the decode engine computes the prompt itself.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from dualmap_edge.logs import get_logger
from dualmap_sidecar.errors import PrefillFailed, UnreadableBody
from dualmap_sidecar.json_object import JsonObject
from dualmap_sidecar.messages import EngineAnswer, for_prefiller
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.outcomes import Reason, Where
from dualmap_sidecar.settings import KvConnector, Settings
from dualmap_sidecar.targets import Target

PARAMETERS: Final = "kv_transfer_params"
CLIENTS_MAY_NOT_SET: Final = (PARAMETERS, "return_token_ids")
"""Members that the proxy removes from clients' bodies. The first one says from where the engine pulls KV."""

_ASK_FOR_REMOTE_DECODE: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_FULL: Final = (429, 503)
# The prefiller rejects the key or lacks the model. If the client is at fault, the engine answers the same.
_MISCONFIGURED: Final = (401, 403, 404)
_TARGETS_REMEMBERED: Final = 1024
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLeg:
    """A request whose prompt is to be prefilled. ``path`` has the query, and ``headers`` are those for the engine."""

    path: str
    headers: "CIMultiDict[str]"
    document: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The result: ``parameters`` is the JSON text that tells the decode engine where the KV is, None without one.

    ``rejection`` is a prefiller's answer about an error of the client.
    """

    where: Where
    parameters: bytes | None = None
    rejection: EngineAnswer | None = None


class Prefillers:
    """The clients of all prefillers, with what the proxy knows about their state."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: Settings,
        metrics: SidecarMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._limits = settings.limits
        self._connector = settings.kv_connector
        self._timeout = aiohttp.ClientTimeout(
            total=settings.prefill_timeout_s, sock_connect=min(settings.limits.connect_s, settings.prefill_timeout_s)
        )
        self._metrics = metrics
        self._clock = clock
        # The time until which a prefiller is not asked, and the last failure of each, the oldest one first.
        self._paused: dict[Target, float] = {}
        self._failing: dict[Target, Reason] = {}

    async def prefill(self, leg: PrefillLeg, targets: Sequence[Target]) -> Prefilled:
        """Ask the targets in order until one has prefilled the prompt or rejected the request."""
        body = prefill_body(leg.document, self._connector)
        for number, target in enumerate(targets):
            started_s = self._clock()
            where = Where.NEXT if number else Where.REMOTE
            try:
                answer = await self._ask(target, leg, body, where)
                rejected = answer.status >= 400
                parameters = None if rejected else self._parameters(answer.first)
            except PrefillFailed as failure:
                self._failed(target, failure)
                continue
            self._metrics.prefill_took(self._clock() - started_s)
            self._works(target)
            return Prefilled(where=where, parameters=parameters, rejection=answer if rejected else None)
        return Prefilled(where=Where.LOCAL)

    async def _ask(self, target: Target, leg: PrefillLeg, body: bytes, where: Where) -> EngineAnswer:
        """Return the target's answer: a success, or an error of the client. Raises PrefillFailed."""
        if self._paused.get(target, 0.0) > self._clock():
            raise PrefillFailed(Reason.PAUSED, "did not answer in time before")
        url = URL(f"http://{target}{leg.path}", encoded=True)
        try:
            async with self._session.post(
                url,
                data=io.BytesIO(body),
                headers=for_prefiller(leg.headers),
                allow_redirects=False,
                timeout=self._timeout,
            ) as response:
                _check_status(response.status)
                return EngineAnswer(
                    status=response.status,
                    reason=response.reason,
                    headers=response.headers,
                    where=where,
                    first=await self._read(response),
                )
        except TimeoutError as error:
            raise PrefillFailed(Reason.TIMEOUT, "timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise PrefillFailed(Reason.UNREACHABLE, str(error.os_error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise PrefillFailed(Reason.CUT, type(error).__name__) from error

    def _parameters(self, body: bytes) -> bytes | None:
        """Return the parameters in a prefiller's answer, None with a shared storage. Raises PrefillFailed."""
        return _parameters(body) if self._connector is KvConnector.NIXL else None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._limits.answer_bytes:
                raise PrefillFailed(Reason.ERROR, f"an answer of more than {self._limits.answer_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    def _failed(self, target: Target, failure: PrefillFailed) -> None:
        self._metrics.prefill_failed(failure.reason)
        if failure.reason is Reason.TIMEOUT:
            # Otherwise each further request would wait for the same prefiller.
            self._paused[target] = self._clock() + self._limits.pause_s
        if failure.reason is Reason.PAUSED or self._failing.get(target) is failure.reason:
            return
        self._failing.pop(target, None)
        self._failing[target] = failure.reason
        while len(self._failing) > _TARGETS_REMEMBERED:
            oldest = next(iter(self._failing))
            del self._failing[oldest]
            self._paused.pop(oldest, None)
        _log.warning("Prefiller fails", prefiller=str(target), reason=failure.reason.value, detail=failure.detail)

    def _works(self, target: Target) -> None:
        self._paused.pop(target, None)
        if self._failing.pop(target, None) is not None:
            _log.info("Prefiller works again", prefiller=str(target))


def prefill_body(document: JsonObject, connector: KvConnector) -> bytes:
    """Return the body of the prefill leg: the same prompt, not streamed, with one output token."""
    remove = ["stream_options", "min_tokens", "return_token_ids"]
    replace = {"stream": b"false", "max_tokens": b"1"}
    if "max_completion_tokens" in document.names:
        replace["max_completion_tokens"] = b"1"
    if connector is KvConnector.NIXL:
        replace[PARAMETERS] = _ASK_FOR_REMOTE_DECODE
    else:
        remove.append(PARAMETERS)
    return document.edited(remove=remove, replace=replace)


def decode_body(document: JsonObject, parameters: bytes | None) -> bytes:
    """Return the body for the decode engine: the client's, with the KV that a prefiller holds, if any."""
    if parameters is None:
        return document.edited(remove=CLIENTS_MAY_NOT_SET)
    return document.edited(remove=("return_token_ids",), replace={PARAMETERS: parameters})


def _check_status(status: int) -> None:
    """Raise PrefillFailed for the status of a failure. Every other 4xx is an error of the client."""
    if status in _FULL:
        raise PrefillFailed(Reason.FULL, f"status {status}")
    if status in _MISCONFIGURED or (not 200 <= status < 300 and not 400 <= status < 500):
        raise PrefillFailed(Reason.ERROR, f"status {status}")


def _parameters(body: bytes) -> bytes:
    """Return the JSON text of the KV's parameters in an answer. Raises PrefillFailed if there are none."""
    try:
        document = JsonObject.parse(body)
    except UnreadableBody as error:
        raise PrefillFailed(Reason.NO_PARAMETERS, str(error)) from error
    raw, value = document.raw(PARAMETERS), document.value(PARAMETERS)
    if raw is None or not isinstance(value, dict) or not value:
        raise PrefillFailed(Reason.NO_PARAMETERS, "an answer without kv_transfer_params")
    return raw
