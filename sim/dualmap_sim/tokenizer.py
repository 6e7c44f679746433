"""The simulated engine's tokenizer: each four bytes of a prompt are one token.

The tokens of ``/tokenize``, of the render endpoints, of ``usage`` and of KV events all come from ``encode``. A token's
id is the little-endian value of its four bytes, so the packed ids of ``dualmap.engines.token_chain`` are the prompt's
own bytes, padded with zeros. Generated tokens have four bytes as well (``openai_answers.py``).
"""

from dualmap.engines.token_chain import TOKEN_BYTES


def encode(prompt: bytes, *, tokens_max: int | None = None) -> bytes:
    """Return the packed token ids of a prompt, at most ``tokens_max`` of them."""
    kept = prompt if tokens_max is None else prompt[: tokens_max * TOKEN_BYTES]
    return kept + bytes(-len(kept) % TOKEN_BYTES)


def count_tokens(prompt: bytes) -> int:
    """Return the number of tokens of a prompt, at least 1."""
    return max(1, len(encode(prompt)) // TOKEN_BYTES)


def unpack(tokens: bytes) -> list[int]:
    """Return the ids of packed tokens."""
    return [int.from_bytes(tokens[at : at + TOKEN_BYTES], "little") for at in range(0, len(tokens), TOKEN_BYTES)]
