"""Tiny GGUF files of random weights, as llama.cpp writes them."""

import json

import gguf
import numpy as np
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.kits import tiny_model, tiny_tokenizer
from tests.kits.models import ARCHITECTURES


def write_gguf(path, seed=0, kind=gguf.GGMLQuantizationType.Q8_0, model=None, **more):
    """A Qwen2, or another `model`, its large matrices in `kind`."""
    model = tiny_model("qwen2", seed=seed) if model is None else model
    architecture = model.config.model_type.replace("_", "")

    def quantised(tensor):
        if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            return {"tensor": gguf.quants.quantize(tensor, kind), "raw_dtype": kind}
        return {"tensor": tensor}

    return _write(path, architecture, model, model.config.intermediate_size, quantised, **more)


def write_permuted(path):
    """A Llama, whose queries and keys stand in another order in such a file."""
    return write_gguf(path, model=tiny_model("llama"))


def write_experts(path):
    """A mixture of experts, two of whose tensors transformers joins."""
    config = ARCHITECTURES["qwen3_moe"]()
    config.moe_intermediate_size = 768  # As transformers has it, whatever such a file says.
    sizes = {"add_expert_count": 4, "add_expert_used_count": 2, "add_key_length": 16}
    return write_gguf(path, model=Qwen3MoeForCausalLM(config), **sizes)


def write_convolved(path):
    """A LFM2, which newer releases of transformers read in another way."""
    size = {"vocab_size": 268, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    model = Lfm2ForCausalLM(Lfm2Config(**size, **layers, num_attention_heads=4, num_key_value_heads=2))
    return _write(path, "lfm2", model, 96, add_head_count_kv=[0, 2], add_vocab_size=268, add_shortconv_l_cache=3)


def write_windowed(path):
    """A Gemma 3, most of whose layers have a sliding window."""
    size = {"vocab_size": 268, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**size, **heads, sliding_window=32))
    return _write(path, "gemma3", model, 96, add_key_length=16, add_value_length=16, add_sliding_window=32)


def write_recurrent(path):
    """A Mamba."""
    config = MambaConfig(vocab_size=268, hidden_size=64, num_hidden_layers=2, state_size=16, time_step_rank=4)
    sizes = {"conv_kernel": 4, "inner_size": config.intermediate_size, "state_size": 16, "time_step_rank": 4}
    sizes = {f"add_ssm_{name}": size for name, size in sizes.items()}
    return _write(path, "mamba", MambaForCausalLM(config), 0, **sizes)


def _write(path, architecture, model, feed_forward, stored=lambda tensor: {"tensor": tensor}, **more):
    """The file of a model, with metadata by the methods of the writer in `more`."""
    made, config, tokenizer = gguf.GGUFWriter(path, architecture), model.config, tiny_tokenizer(merges=7)
    made.add_context_length(getattr(config, "max_position_embeddings", 2048))
    made.add_embedding_length(config.hidden_size)
    made.add_block_count(config.num_hidden_layers)
    made.add_feed_forward_length(feed_forward)
    made.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    made.add_head_count(getattr(config, "num_attention_heads", 0))
    if hasattr(config, "num_key_value_heads") and "add_head_count_kv" not in more:
        made.add_head_count_kv(config.num_key_value_heads)
    if theta := (getattr(config, "rope_parameters", None) or {}).get("rope_theta"):
        made.add_rope_freq_base(theta)
    for name, value in more.items():
        getattr(made, name)(value)
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = {token["content"] for token in words["added_tokens"]}
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("qwen2")
    made.add_token_list(tokens)
    made.add_token_types([gguf.TokenType.CONTROL if each in special else gguf.TokenType.NORMAL for each in tokens])
    made.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    made.add_eos_token_id(tokenizer.eos_token_id)
    made.add_bos_token_id(tokenizer.bos_token_id)
    made.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        data, stem = tensor.float().numpy().squeeze().astype(np.float32), name.removesuffix(".experts.gate_up_proj")
        if stem != name:
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True):
                made.add_tensor(f"blk.{stem.split('.')[2]}.ffn_{part}_exps.weight", **stored(half))
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            made.add_tensor(f"{found}.weight" if name.endswith(".experts.down_proj") else found, **stored(data))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path
