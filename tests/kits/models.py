"""Tiny models of the supported architectures with random weights, and a small tokenizer; tests need no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

__all__ = ["ARCHITECTURES", "CHATML", "tiny_model", "tiny_tokenizer"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The simplest template: every role, in ChatML."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")

_COMMON: dict[str, Any] = {
    "vocab_size": 268,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "initializer_range": 0.05,
}
_GROUPED = {"num_key_value_heads": 2}

ARCHITECTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON, **_GROUPED),
    "qwen2": lambda: Qwen2Config(**_COMMON, **_GROUPED),
    "qwen3": lambda: Qwen3Config(**_COMMON, **_GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, **_GROUPED, sliding_window=None),
    "phi3": lambda: Phi3Config(**_COMMON, **_GROUPED, sliding_window=None),
    "gemma": lambda: GemmaConfig(**_COMMON, num_key_value_heads=1, head_dim=16),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, **_GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
"""Configurations by name; an architecture added here joins every test matrix."""


def tiny_model(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return a model of one of `ARCHITECTURES` with two layers and random weights."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        ARCHITECTURES[architecture](), dtype=dtype, trust_remote_code=False
    )
    return model.eval()


def tiny_tokenizer(chat_template: str = CHATML, merges: int = 0) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 256 bytes and five special tokens, with `chat_template`.

    `merges` is a number of merges of digits, letters and line feeds, so that tokens may cross the edges of a pack.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Special tokens have fixed ids for any number of merges, because the tiny models' configurations name them.
    vocabulary = {token: index for index, token in enumerate((*alphabet, *_SPECIAL))}
    # Byte-level alphabets write a line feed as "Ċ".
    pairs = [("Ċ", "Ċ"), (".", "Ċ"), (".", "ĊĊ"), ("t", "h"), ("a", "n"), ("e", "r"), ("th", "e")][:merges]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    end, begin = "<|im_end|>", "<s>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token=begin, chat_template=chat_template
    )
