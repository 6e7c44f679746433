"""Converts block ids into prompt text. An id always gives the same bytes, so equal ids give equal prefixes.

The replay sends this text through the router to engines. The router hashes the bytes, and the engines count four bytes
as one token (``dualmap.prompts.blocks.BYTES_PER_TOKEN``).
"""

from hashlib import shake_128

from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap_sim.workloads.trace import TraceRequest

_HEX_DIGITS_PER_BYTE = 2


def block_text(block: int, *, tokens: int) -> str:
    """Return the first ``tokens`` tokens of a block, as hexadecimal digits, which need no escaping in JSON.

    The digits come from an extendable-output function, so a shorter text is a prefix of a longer text.
    """
    length = tokens * BYTES_PER_TOKEN // _HEX_DIGITS_PER_BYTE
    return shake_128(b"block %d" % block).hexdigest(length)


def prompt_text(request: TraceRequest, *, block_tokens: int) -> str:
    """Return a request's prompt: exactly ``input_tokens`` tokens of ``BYTES_PER_TOKEN`` bytes."""
    full, rest_tokens = divmod(request.input_tokens, block_tokens)
    texts = [block_text(block, tokens=block_tokens) for block in request.blocks[:full]]
    if rest_tokens:
        texts.append(block_text(request.blocks[full], tokens=rest_tokens))
    return "".join(texts)
