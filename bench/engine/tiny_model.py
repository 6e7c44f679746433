"""Writes a small random Qwen2 model with a tokenizer and a ChatML template into a folder.

``serve.py`` runs this script with the Python of a vLLM installation. No weights are downloaded. All random values come
from a fixed seed. The first argument is the folder, and the second the size:

- ``slow`` has 25 million parameters (512 wide, 8 layers, 8 heads, 4 of them with KV). On a CPU core it is slow enough
  to separate a prefill's time from its overhead.
- ``fast`` is 64 wide with 2 layers. A token takes 512 bytes of KV memory.
- ``contextual`` is as ``fast``, with larger weights. Its answers depend on all tokens of a prompt; the others mostly
  repeat the last token.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

VOCABULARY = 2048
END = "<|endoftext|>"
MESSAGE, MESSAGE_END = "<|im_start|>", "<|im_end|>"
_FAST = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIZES: dict[str, dict[str, float]] = {
    "slow": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "fast": _FAST,
    "contextual": {**_FAST, "initializer_range": 0.2},
}
# The template has the parts that change token ids: tools before the messages, tool calls, and a generation prompt.
TEMPLATE = """\
{%- if tools %}
{{- "<|im_start|>system\\n# Tools\\n" }}
{%- for tool in tools %}
{{- tool | tojson }}
{{- "\\n" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.content %}
{{- message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- "\\n<tool_call>\\n" + {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
{{- "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}
{%- endif %}
"""


def main(folder: str, size: str) -> None:
    """Write the tokenizer and the model."""
    tokenizer = Tokenizer(models.BPE())
    # For a Qwen2 model, transformers uses Qwen2's own rules, whatever tokenizer.json says.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END, MESSAGE, MESSAGE_END],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        **SIZES[size],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


main(*sys.argv[1:])
