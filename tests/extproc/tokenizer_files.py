"""A small byte-level tokenizer with a chat template, written as the files of a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "u s", "e r", "us er")
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def tokenizer_json(special: Sequence[str] = SPECIAL, **flags: bool) -> dict[str, Any]:
    vocab = {token: number for number, token in enumerate((*special, *byte_letters().values()))}
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    own = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False, **flags}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **own} for number, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": list(MERGES),
        },
    }


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, special: Sequence[str] = SPECIAL, **flags: bool
) -> Path:
    """Write the files into a folder, and return it."""
    folder.mkdir(exist_ok=True)
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(special, **flags)))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
