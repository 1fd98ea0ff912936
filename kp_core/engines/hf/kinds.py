"""What the layers of an architecture cache, and which capabilities this allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kp_core.errors import UnsupportedModelError

__all__ = ["CacheKind", "kind_of", "narrowed", "positions_of", "rope_parameters"]

_WHY_NOT = {
    "DynamicIndexedLayer": "its layers keep an index beside keys and values, by which they choose what to look at",
}
_OWN = "transformers keeps its recurrent states in a place of its own, not in the cache"
_FROM_ZERO = "the selective scan of transformers (Mamba 1) starts from zero, not from a cached state"
_UNFIT = {
    "falcon_mamba": _FROM_ZERO,
    "jamba": _FROM_ZERO,
    "mamba": _FROM_ZERO,
    "minimax": _OWN,
    "recurrent_gemma": _OWN,
    "zamba": _FROM_ZERO,
}
"""Model types whose recurrent layers cannot continue from a cached state."""
_LATENT = "kv_lora_rank"
_SIZES = ("sliding_window", "attention_chunk_size")
"""Fields of a configuration from which transformers reads the window size for masks."""
_BATCHED = ("plain", "windows")
"""Kinds of cache for which several answers can be decoded in one pass (`CausalModel.batches`)."""
_ALIBI = ("bloom",)
"""Model types that always use ALiBi."""


@dataclass(frozen=True)
class CacheKind:
    """What each layer of a model caches per token.

    `windows` has one entry per layer: how many tokens a token sees there, itself included. It is 0 if the token sees
    all tokens before it, and `None` if the layer caches no KV, because it reads that of another layer or has no
    attention. `is_recurrent`: layers keep one state of all tokens, with or without KV, which is known at some tokens
    only. `is_latent`: the cache holds latents of multi-head latent attention. `is_biased`: attention depends on the
    distance in the cache (ALiBi). `is_chunked`: windows are consecutive chunks of positions instead of sliding.
    """

    windows: tuple[int | None, ...]
    is_latent: bool = False
    is_biased: bool = False
    is_recurrent: bool = False
    is_chunked: bool = False

    @property
    def name(self) -> str:
        """Name of the kind in `docs/models.md`."""
        parts = {
            "latent": self.is_latent,
            "windows": any(self.windows),
            "shared KV": None in self.windows and not self.is_recurrent,
            "states": self.is_recurrent,
        }
        return ", ".join(part for part, holds in parts.items() if holds) or "plain"

    @property
    def lacks(self) -> dict[str, str]:
        """Capabilities (`kp_core.engines.base.CAPABILITIES`) that this cache does not allow, each with the reason."""
        reasons = {}
        if self.is_recurrent:
            why = "some of its layers keep one recurrent state of all tokens"
            reasons["compose"] = f"{why}, which cannot be moved, joined or changed in part"
            reasons["steer"] = f"{why}, and no values to alter"
        elif self.is_latent:
            why = "its cache holds latents of multi-head latent attention"
            reasons["compose"] = f"{why}, which are moved with no rotation"
            reasons["steer"] = f"{why} and rotary keys, so there are no values to alter"
        elif any(self.windows):
            reasons["compose"] = "some of its layers see a window of tokens, which moved keys would leave or enter"
        elif None in self.windows:
            reasons["compose"] = "some of its layers read the KV of others"
        elif self.is_biased:
            reasons["compose"] = "its attention counts how far apart tokens are in the cache (ALiBi)"
        if self.name not in _BATCHED:
            reasons["batch"] = f"one pass over several answers is not written for a cache with {self.name}"
        return reasons


def kind_of(config: Any) -> CacheKind:  # noqa: ANN401
    """What an architecture caches, from its configuration.

    Raises `UnsupportedModelError`, with the reason, for architectures that packs cannot serve: encoders, RoPE
    frequencies that change with the length, and caches of an unknown kind.
    """
    name = getattr(config, "model_type", type(config).__name__)
    text = config.get_text_config(decoder=True)
    is_encoder = hasattr(text, "add_cross_attention") and getattr(text, "is_decoder", None) is False
    looks_ahead = not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (
        True,
        "all",
    )
    rope = rope_parameters(text)
    # If layers differ, there is one mapping for each kind of layer.
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    reasons = {
        "it is an encoder-decoder, with cross attention": getattr(config, "is_encoder_decoder", False),
        "it is an encoder, whose tokens see what stands behind them": is_encoder or looks_ahead,
        "its RoPE frequencies change with the length": "dynamic" in kinds,
        _UNFIT.get(text.model_type, ""): text.model_type in _UNFIT,
    }
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reasons[f"transformers makes no plain cache for it ({type(error).__name__}: {error})"] = True
        layers = []
    windows: list[int | None] = []
    for layer in layers:
        match type(layer).__name__:
            case "DynamicLayer" | "LinearAttentionAndFullAttentionLayer":
                windows.append(0)
            case "DynamicSlidingWindowLayer" | "LinearAttentionAndSlidingWindowAttentionLayer":
                windows.append(int(layer.sliding_window))
            case "DummyLayer" | "LinearAttentionLayer":
                windows.append(None)
            case layer_type:
                reasons[_WHY_NOT.get(layer_type, f"it keeps {layer_type}, which is unknown here")] = True
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{name} cannot be served from packs: {reason}.")
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    is_biased = any(getattr(part, "alibi", False) for part in (text, getattr(text, "attn_config", None)))
    is_latent = getattr(text, _LATENT, None) is not None
    is_chunked = getattr(text, "attention_chunk_size", None) is not None
    return CacheKind(tuple(windows), is_latent, is_biased or name in _ALIBI, is_recurrent, is_chunked)


@contextmanager
def narrowed(kind: CacheKind, config: Any, tokens: int) -> Iterator[CacheKind]:  # noqa: ANN401
    """`kind` with windows of at most `tokens` tokens; the text `config` has the same windows inside the context."""
    windows, sizes = tuple(size and min(size, tokens) for size in kind.windows), dict[str, int]()
    try:
        for name in _SIZES if any(windows) else ():
            # Some configurations have no single size, because layers differ, or cannot be changed.
            with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
                if size := getattr(config, name):
                    setattr(config, name, min(size, tokens))
                    sizes[name] = size
        yield replace(kind, windows=windows)
    finally:
        for name, size in sizes.items():
            setattr(config, name, size)


def positions_of(config: Any) -> int:  # noqa: ANN401
    """Most tokens a sequence may have, from a text configuration.

    If the RoPE frequencies change with the length (`longrope`), this is the length up to which they are constant.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**31 - 1
    rope = rope_parameters(config)
    if rope.get("rope_type") == "longrope":
        limit = rope.get("original_max_position_embeddings") or limit
    return int(limit)


def rope_parameters(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """The RoPE part of a configuration; empty if there is none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(parameters)
