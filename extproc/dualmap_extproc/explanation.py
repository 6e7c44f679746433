"""A decision and its reasons, as a router that has just started would take it; ``explain`` is the command.

The request walks the very path it would walk in a router: the same Picker, over routers that have seen nothing yet.
"""

from dualmap.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused, body_too_large, no_endpoint
from dualmap_extproc.picker import Picker, Waiting
from dualmap_extproc.settings import Limits


class _Recorder:
    """An observer that keeps the one decision it is told of."""

    def __init__(self) -> None:
        self.decision: Decision | None = None

    def routed(self, pool: str, decision: Decision) -> None:
        self.decision = decision

    def routed_bodiless(self, pool: str) -> None: ...

    def refused(self, refused: Refused) -> None: ...

    def waited(self, pool: str, seconds: float) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def first_token(self, pool: str, first_token: FirstToken) -> None: ...

    def finished(self, pool: str, completion: Completion) -> None: ...

    def rejected(self, pool: str, completion: Completion) -> None: ...

    def aborted(self, pool: str, completion: Completion) -> None: ...

    def failed(self, pool: str, completion: Completion) -> None: ...

    def expired(self, pool: str, completion: Completion) -> None: ...

    def measured(self, pool: str, completion: Completion) -> None: ...

    def served_elsewhere(self, pool: str) -> None: ...


def decide(pools: tuple[Pool, ...], body: bytes) -> Receipt | Refused:
    """Return the receipt a router that has just started would give a request body."""
    limits = Limits()
    if len(body) > limits.body_bytes:
        return body_too_large(limits.body_bytes)
    recorder = _Recorder()
    picker = Picker(limits, recorder, id_prefix="explain")
    picker.set_pools(0.0, pools)
    outcome = picker.pick(0.0, body, None, 0.0, headers={}, resume=lambda _: None)
    if isinstance(outcome, Waiting):
        # Nothing is busy here, so it can only be the first member that it would wait for.
        return no_endpoint("")
    if isinstance(outcome, Refused):
        return outcome
    assert recorder.decision is not None, "a pick is always reported"
    return recorder.decision.receipt


def in_words(receipt: Receipt) -> str:
    """Return a receipt as a short text for people."""
    lines = [
        f"{receipt.chosen} ({receipt.address}) gets this request of pool {receipt.pool}.",
        f"Because {receipt.reason} (policy {receipt.policy}, rule {receipt.rule}).",
        f"Key: {_key(receipt)} ({receipt.key.hash:016x}).",
        f"Pair: {' and '.join(receipt.pair)}, by ring 1 and ring 2.",
        "Candidates:",
    ]
    for each in receipt.candidates:
        held = f" holds {_count(each.matched_tokens, 'token')} of the prompt," if receipt.prompt_tokens else ""
        lines += [
            f"  {each.id} ({each.state}):{held}",
            f"    {_count(each.pending_tokens, 'prefill token')} pending,"
            f" {_count(each.in_flight, 'request')} in flight; predicted TTFT {_duration(each.ttft_s)}",
        ]
    return "\n".join(lines)


def _key(receipt: Receipt) -> str:
    if not receipt.key.blocks:
        return "no prompt, so the request's own id"
    key = receipt.key
    return f"{_count(key.blocks, 'block')}, {key.tokens} of the prompt's {_count(receipt.prompt_tokens, 'token')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
