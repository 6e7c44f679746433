"""Writes a small random Qwen2 model with a tokenizer into a folder.

``serve.py`` runs this script with the Python of a vLLM installation. The model has 25 million parameters (512 wide, 8
layers, 8 heads, 4 of them with KV). On a CPU core this model is slow enough to separate a prefill's time from its
overhead. No weights are downloaded. All random values come from a fixed seed.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 2048
END = "<|endoftext|>"


def main(folder: str) -> None:
    """Write the tokenizer and the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


main(*sys.argv[1:])
