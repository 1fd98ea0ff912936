"""Tiny random models of the causal language models of transformers, made from their configurations."""

from functools import cache
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kp_core.engines.hf.kinds import kind_of
from kp_core.errors import ModelError

WINDOW = 64
"""Tokens of every sliding window and attention chunk here."""

_SMALL = {
    "vocab_size": 268,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 259,
    "eos_token_id": 258,
    "pad_token_id": 256,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # Windows.
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": WINDOW,
    "window_size": WINDOW,
    # Recurrent layers.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    # What some call otherwise, or have alone.
    "num_layers": 2,
    "rotary_dim": 8,
    "ffn_dim": 48,
    "dff": 48,
    "dim_head": 8,
    "dim_ff": 48,
    "max_seq_len": 2048,
    "n_ctx": 2048,
    "word_embed_proj_dim": 32,
    "intermediate_size_mlp": 48,
    "vocab_size_per_layer_input": 268,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
"""What a configuration is given of this, if it knows the name."""

_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_SEES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_INKLING = {
    "layer_types": ["hybrid", "hybrid_sliding"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": WINDOW,
    "rel_extent": WINDOW,
}
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}

CHANGES = {
    "gemma3": {"vision_config": _SEES, "mm_tokens_per_image": 4},
    "gemma3n_text": _SHARED,
    "gemma4_text": {**_SHARED, "global_head_dim": 16},
    "gemma4_unified_text": {**_SHARED, "global_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 16,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
"""What a family needs beyond `_SMALL`."""

VARIANTS = {
    "falcon with ALiBi": ("falcon", {"alibi": True}),
    "gemma4_text with experts": ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 2}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "phi3 with longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        },
    ),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
}
"""Further rows: the family, and what is changed."""

ONE_BY_ONE = (
    "biogpt",
    "bloom",
    "codegen",
    "diffllama",
    "falcon",
    "falcon with ALiBi",
    "gemma2",
    "gpt_neo",
    "gpt_neox_japanese",
    "gptj",
    "hrm_text",
    "jetmoe",
    "mpt",
    "nemotron",
    "stablelm",
    "trocr",
    "vaultgemma",
    "xglm",
)
"""Families of plain caches and of windows whose answers are decoded one by one: their attention is their own, or
rows do not agree."""

STAY = (
    "biogpt",
    "codegen",
    "cohere_compass_text",
    "ctrl",
    "fuyu",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "mllama",
    "nanochat",
    "opt",
    "trocr",
    "xglm",
)
"""Plain families whose keys cannot be moved: they have no RoPE, or turn in another way."""

QUICK = (
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "llama4_text",
    "mistral",
    "deepseek_v3",
    "phi3 with longrope",
    "falcon_h1",
    "lfm2",
    "qwen3_next",
)
"""What runs in the first tier; one of each kind of cache."""

NOT_RUN = {
    "it takes images or sound too, and its tiny model is not small": (
        "gemma3n",
        "got_ocr2",
        "git",
        "moshi",
        "moss_transcribe_diarize",
        "phi4_multimodal",
    ),
    "its memory of the prompt is a fixed prefix of its own": ("cpmant",),
    "it takes no cache of keys and values": ("openai-gpt", "reformer", "rwkv", "xlm", "xlnet", "xlstm"),
    "it drafts for another model, whose KV it reads": ("gemma4_assistant", "gemma4_unified_assistant"),
}
"""Reasons, each with the families that no tiny model is made of."""


PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

Made by `python -m tests.parity.families` from the matrix of `tests/parity/test_models.py`; do not edit.

Each `model_type` below was tested as a tiny random model, with the transformers release in `requirements.lock`. From
a pack it gives what it gives from the text, and in float32 what `model.generate` gives, token for token. Whether also
the bits are those of the text is [tested at load](loading.md#the-same-bits). What a layer caches decides what else
works:

- **plain**: keys and values of every token. [`splice`](several-packs.md) needs movable keys, else *not splice*.
- **windows** (sliding or chunked): all tokens are kept. Only the exact composer.
- **shared KV**: layers that read the KV of others store nothing.
- **latent**: the latent and rotary key of multi-head latent attention. No steering, only the exact composer.
- **states** (Mamba 2, gated delta rule, short convolutions): states are kept at the end of each pack and message; a
  prompt that differs inside a message is computed from its beginning. No steering, only the exact composer.

*Batching*: answers at the same time are decoded together; else in turns. It needs an attention that can be replaced.

| cache | composing | steering | batching | `model_type` |
|---|---|---|---|---|"""

REFUSED = """
## What is not served, or not tried

Refused at load, before weights are read, or left out of the matrix: encoders and encoder-decoders (BERT, BART and their
kin), and

| reason | `model_type` |
|---|---|"""


def families():
    """Every model type whose causal language model transformers has, one for each class."""
    # Of the types of one class the last is the plainest: of text alone.
    named = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return {kind: name for name, kind in named.items()}


def config_of(kind, **changes):
    """A tiny configuration of a model type."""
    kind, variant = VARIANTS.get(kind, (kind, {}))
    known = CONFIG_MAPPING[kind]()
    changed = _small(known)
    if getattr(known, "text_config", None) is not None:
        changed["text_config"] = _small(known.text_config) | CHANGES.get(known.text_config.model_type, {})
    return CONFIG_MAPPING[kind](**changed | CHANGES.get(kind, {}) | variant | changes)


def _small(known):
    changed = {name: value for name, value in _SMALL.items() if _takes(known, name)}
    if "kv_lora_rank" in changed and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = _SMALL["num_attention_heads"]
    kinds = set(getattr(known, "layer_types", None) or ())
    if {"full_attention"} < kinds and _takes(known, "layer_types"):
        # One layer that sees all, one of another kind.
        changed["layer_types"] = [*sorted(kinds - {"full_attention"}), "full_attention"][-2:]
    return changed


def _takes(config, name):
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return hasattr(config, name)
    except (RuntimeError, NotImplementedError, ValueError):  # Some layers have another, or there is no limit.
        return True


def model_of(kind, dtype=torch.float32, **changes):
    """A tiny random model of a model type."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            # As training leaves them, so that what attention sees matters to the answer.
            if weight.ndim > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    precise = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    model = model.to(dtype)
    for name, weight in model.named_parameters():
        if any(each in name for each in precise):  # As loading leaves them.
            weight.data = weight.data.float()
    return model.eval()


@cache
def kinds():
    """What each family caches, or why it is refused, for all that are run here."""
    found = {}
    named = {kind for kinds in NOT_RUN.values() for kind in kinds}
    for kind in (*families(), *VARIANTS):
        if kind not in named:
            try:
                if kind not in VARIANTS:
                    kind_of(CONFIG_MAPPING[kind]())
                found[kind] = kind_of(config_of(kind))
            except ModelError as error:
                found[kind] = str(error).partition(": ")[2].rstrip(".")
    return found


def served():
    """The families of the matrix."""
    return sorted(kind for kind, found in kinds().items() if not isinstance(found, str))


def page():
    """`docs/models.md`."""
    lines, groups = [HEAD], {}
    for kind in served():
        found = kinds()[kind]
        steers = "no" if "steer" in found.lacks else "yes"
        composes = "no" if "compose" in found.lacks else "not splice" if kind in STAY else "yes"
        batches = "yes" if found.name in ("plain", "windows") and kind not in ONE_BY_ONE else "no"
        groups.setdefault((found.name, composes, steers, batches), []).append(kind)
    for group, named in sorted(groups.items()):
        lines.append(f"| {' | '.join(group)} | {', '.join(named)} |")
    lines.append(REFUSED)
    reasons = {}
    for kind, found in kinds().items():
        if isinstance(found, str) and "encoder" not in found:
            reasons.setdefault(found, []).append(kind)
    for reason, named in sorted((reasons | NOT_RUN).items()):
        lines.append(f"| {reason} | {', '.join(f'`{kind}`' for kind in sorted(named))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
