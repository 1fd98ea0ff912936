"""What the layers of an architecture cache, which capabilities this allows, and a KV buffer as transformers' cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kp_core.engines.hf.attention import Sees
from kp_core.engines.local.buffer import BufferLayer, CacheShape, KVBuffer, StateShape
from kp_core.errors import ModelError

PROBE = 8
"""Tokens of the forward pass that measures the shape of a cache."""
_INDEXED = "its layers keep an index beside keys and values, by which they choose what to look at"
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
WINDOW_SIZES = ("sliding_window", "attention_chunk_size")
"""Fields of a configuration from which transformers reads the window size for masks."""


@dataclass(frozen=True)
class CacheKind:
    """What each layer of a model caches per token.

    `windows` has one entry per layer: how many tokens a token sees there, itself included; 0 if it sees all, `None` if
    the layer caches no KV. `is_recurrent`: layers keep one state of all tokens, with or without KV. `is_latent`: the
    cache holds latents of multi-head latent attention. `is_biased`: attention depends on the distance in the cache
    (ALiBi). `is_chunked`: windows are consecutive chunks of positions instead of sliding.
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
        """Capabilities (`kp_core.plan.engine.CAPABILITIES`) that this cache does not allow, each with the reason."""
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
        if self.name not in ("plain", "windows"):
            reasons["batch"] = f"one pass over several answers is not written for a cache with {self.name}"
        return reasons


def kind_of(config: Any) -> CacheKind:  # noqa: ANN401
    """What an architecture caches, from its configuration.

    Raises `ModelError`, with the reason, for architectures that packs cannot serve: encoders, RoPE
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
            case "DynamicIndexedLayer":
                reasons[_INDEXED] = True
            case layer_type:
                reasons[f"it keeps {layer_type}, which is unknown here"] = True
    for reason, holds in reasons.items():
        if holds:
            raise ModelError(f"{name} cannot be served from packs: {reason}.")
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    # BLOOM always uses ALiBi.
    is_biased = any(getattr(part, "alibi", name == "bloom") for part in (text, getattr(text, "attn_config", None)))
    is_latent = getattr(text, "kv_lora_rank", None) is not None
    is_chunked = getattr(text, "attention_chunk_size", None) is not None
    return CacheKind(tuple(windows), is_latent, is_biased, is_recurrent, is_chunked)


def positions_of(config: Any) -> int:  # noqa: ANN401
    """Most tokens a sequence may have, from a text configuration; with `longrope`, those of constant frequencies."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**31 - 1
    rope = rope_parameters(config)
    if rope.get("rope_type") == "longrope":
        limit = rope.get("original_max_position_embeddings") or limit
    return int(limit)


def rope_parameters(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """The RoPE part of a configuration; empty if there is none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(parameters)


class LayersDone(Exception):  # noqa: N818 - no error: all wanted layers are computed
    """Ends a forward pass when the last wanted layer has its keys and values."""


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a buffer: new tokens are written behind the others, or at given `places`.

    It returns the first tokens of the buffer, up to the new ones or up to `stop`; with a `window`, those that the new
    tokens may see, as the cache of transformers does; with `in_tiles`, the whole buffer. With `ends_pass`, it raises
    `LayersDone` when the tokens are written.
    """

    def __init__(  # noqa: PLR0913
        self,
        layer: BufferLayer,
        *,
        window: int = 0,
        in_tiles: bool = False,
        places: Tensor | None = None,
        stop: int = 0,
        ends_pass: bool = False,
        **more: Any,  # noqa: ANN401 - as the classes of transformers
    ) -> None:
        super().__init__(**more)
        self._layer, self._window, self._in_tiles = layer, window, in_tiles
        self._places, self._stop, self._ends_pass = places, stop, ends_pass
        self.keys, self.values = layer.memory
        self.is_initialized, self.is_sliding = True, window > 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the new tokens, when the earlier ones are there; returns the keys and values that they attend to."""
        start = self._first()
        if self._places is None:
            self._layer.write(key_states, value_states)
            stop = self._layer.length
        else:
            self._layer.put(key_states, value_states, self._places)
            stop = self._stop
        if self._ends_pass:
            raise LayersDone
        if self._in_tiles:
            return self.keys, self.values
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def get_seq_length(self) -> int:
        """Number of filled tokens."""
        return self._layer.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self._layer.length + query_length - self._first(), self._first()

    def _first(self) -> int:
        """The first token that the next one sees."""
        return max(self._layer.length + 1 - self._window, 0) if self._window else 0


class _LayerAndStates(_Layer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer that keeps recurrent states and KV."""


def placed_cache_of(buffer: KVBuffer, places: Tensor, stop: int, *, layers: int, in_tiles: bool) -> Cache:
    """A cache that writes new tokens to `places` of `buffer`, and returns its first `stop` tokens, or all `in_tiles`.

    After `layers` whole layers, `LayersDone` is raised when the next layer of the buffer has its keys and values.
    """
    return Cache(
        layers=[
            _Layer(layer, places=places, stop=stop, ends_pass=index == layers, in_tiles=in_tiles)
            for index, layer in enumerate(buffer.layers)
        ]
    )


def cache_of(buffer: KVBuffer, windows: Sequence[int | None], *, in_tiles: bool) -> Cache:
    """A cache that reads and writes `buffer`, for layers with the `windows` of `CacheKind`.

    With `in_tiles`, layers return the whole buffer for tiled attention, which applies the windows itself.
    """
    if not buffer.has_states:
        raise AssertionError("a model with states goes on from where they are known")
    stored, states = iter(buffer.layers), list(zip(buffer.shape.states, buffer.states, strict=True))
    layers = [
        _layer_of(stored, window, [pair for pair in states if pair[0].layer == at], in_tiles=in_tiles)
        for at, window in enumerate(windows)
    ]
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, buffer.length > 0)
    return Cache(layers=layers)


def _layer_of(
    stored: Iterator[BufferLayer], window: int | None, states: list[tuple[StateShape, Tensor]], *, in_tiles: bool
) -> Any:  # noqa: ANN401 - transformers is untyped here
    """One layer of a cache, with the next of the `stored` layers of a buffer if it keeps KV, and with its `states`."""
    options: dict[str, Any] = {"window": 0 if in_tiles else window, "in_tiles": in_tiles}
    if not states:
        if window is not None:
            return _Layer(next(stored), **options)
        from transformers.cache_utils import DummyLayer  # Older than 5.20 lacks it, and no model there needs it.

        return DummyLayer()
    count = 1 + max(shape.index for shape, _ in states)
    if window is None:
        layer = LinearAttentionLayer(number_of_states=count)
    else:
        layer = _LayerAndStates(next(stored), **options, number_of_states=count)
    layer.device, layer.dtype = states[0][1].device, states[0][1].dtype
    for shape, state in states:
        # Forward passes write to the state in place.
        getattr(layer, f"{shape.kind}_states")[shape.index] = state
        getattr(layer, f"is_{shape.kind}_states_initialized")[shape.index] = True
        if shape.kind == "conv":
            layer.conv_kernel_size[shape.index] = state.shape[-1]
    return layer


def cache_parameter(model: Any) -> str:  # noqa: ANN401
    """Name of the parameter that takes the cache; transformers 5.24 renames both others to `cache`."""
    names = ("past_key_values", "cache_params", "cache")
    return next((name for name in names if name in inspect.signature(model.forward).parameters), names[0])


@torch.inference_mode()
def measured_shape(model: Any, windows: Sequence[int | None]) -> CacheShape:  # noqa: ANN401
    """The shape of what a model caches, measured by a pass of `PROBE` tokens; `windows` is as in `CacheKind`.

    Raises `ModelError` if the model does not run with a cache, if a layer does not cache KV per token, and
    if a model with recurrent states is on several devices.
    """
    config, device = model.config, model.device
    cache = DynamicCache(config=config)
    ids = torch.zeros(1, PROBE, dtype=torch.long, device=device)
    try:
        model(input_ids=ids, **{cache_parameter(model): cache}, use_cache=True)
    except (TypeError, AttributeError, ValueError, LookupError) as error:
        raise ModelError(f"{config.model_type} does not run with a cache of keys and values: {error}") from error
    # The model's own cache drops tokens that left the window.
    tokens = [min(PROBE, window - 1) if window else PROBE for window in windows if window is not None]
    stored = [layer for layer, window in zip(cache.layers, windows, strict=True) if window is not None]
    shapes = []
    for index, (layer, length) in enumerate(zip(stored, tokens, strict=True)):
        key_shape, value_shape = (tuple(getattr(side, "shape", ())) for side in (layer.keys, layer.values))
        if len(key_shape) != 4 or key_shape[2] != length or key_shape[:3] != value_shape[:3]:
            raise ModelError(
                f"Layer {index} of {config.model_type} caches no keys and values per token: after {PROBE} "
                f"tokens its keys have shape {key_shape} and its values {value_shape}; expected (batch, kv_heads, "
                f"{length}, head_dim)."
            )
        shapes.append((key_shape[1], key_shape[3], value_shape[3]))
    states = tuple(
        StateShape(at, kind, index, tuple(state.shape[1:]), state.dtype)
        for at, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    )
    if not stored:  # The model keeps states alone: a layer without heads counts the tokens.
        return CacheShape(((0, 0, 0),), model.dtype, device, states)
    first_keys: Tensor = stored[0].keys
    devices = tuple(layer.keys.device for layer in stored)
    if len(set(devices)) == 1:
        return CacheShape(tuple(shapes), first_keys.dtype, first_keys.device, states)
    if states:
        raise ModelError(
            f"{config.model_type} keeps recurrent states, and its layers are on {len(set(devices))} devices; "
            "load it on one."
        )
    return CacheShape(tuple(shapes), first_keys.dtype, first_keys.device, devices=devices)


class Network:
    """A model of transformers, in a view of its own, and the shape of what it caches.

    Raises `ModelError`, with the reason, for architectures that packs cannot serve.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind = kind_of(model.config)
        # RoPE frequencies are copied, because `longrope` writes them in every pass.
        shared = (buffer for name, buffer in model.named_buffers() if not name.endswith("inv_freq"))
        tensors = {id(tensor): tensor for tensor in chain(model.parameters(), shared)}
        self.network: Any = copy.deepcopy(model, tensors).eval()
        """A copy of the modules that shares the tensors, so that the caller's model keeps its own attention setting."""
        self.config: Any = self.network.config
        self.text: Any = self.config.get_text_config(decoder=True)
        """The part of the configuration for the language model."""
        self.device: torch.device = self.network.device
        self.vocabulary = int(self.network.get_output_embeddings().weight.shape[0])
        """Length of the logits, which may be longer than the tokenizer's vocabulary."""
        self.keeps_logits = "logits_to_keep" in inspect.signature(self.network.forward).parameters
        """Whether a pass can return the logits of some tokens alone."""
        self.takes_cache = cache_parameter(self.network)
        self.shape = measured_shape(self.network, self.kind.windows)

    @property
    def sees(self) -> list[Sees]:
        """What a token sees in each layer."""
        return [Sees(window or 0, self.kind.is_chunked) for window in self.kind.windows]

    def keep(self, last: int | Tensor) -> dict[str, Any]:
        """Arguments of a pass that returns the logits of its `last` tokens alone, or of those at some indices.

        Empty if the model returns all logits.
        """
        return {"logits_to_keep": last} if self.keeps_logits else {}
