"""Loads Hugging Face models on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kp_core.engines.hf.bundled import bundled_model
from kp_core.engines.hf.identity import ModelWatch, take_fingerprint
from kp_core.engines.hf.loading import KV_SHARE, LOADING, load, memory_bytes, name_of
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.engine import LocalEngine
from kp_core.engines.request import refuse_unknown
from kp_core.engines.session import Session
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.prompt.template import ChatTemplate

__all__ = ["load_session"]


def load_session(  # noqa: PLR0913 - every setting has a default that works
    model: str | Path | PreTrainedModel | None = None,
    *,
    tokenizer: Any = None,  # noqa: ANN401
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    chunk_tokens: int = 1024,
    cache_bytes: int | None = None,
    template_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **loading: Any,  # noqa: ANN401
) -> Session:
    """A session with a Hugging Face causal language model.

    `model` is an id, a folder, a GGUF file, or a model object (with `tokenizer`); by default the bundled
    SmolLM2-135M-Instruct. The default `device` is the best available (CUDA, MPS, CPU). The default `dtype` is bfloat16
    if the machine supports it; `"auto"` keeps that of the checkpoint. `cache_bytes` is the budget of all KV in memory,
    both of running requests and cached for later ones: by default a quarter of the device's memory. `chunk_tokens` is
    the most tokens of one forward pass, for which other requests wait. `template_options` go to the chat template.
    Code in a checkpoint runs only with `trust_remote_code`. `loading` goes to `from_pretrained`: `device_map`,
    `quantization_config`, `attn_implementation` (the model then keeps it, and it is part of the numerics), `revision`,
    `token`, `torch_dtype`.

    Raises `OptionError` for unknown names, `ModelError` when loading fails, `UnsupportedModelError` for architectures
    that packs cannot serve, `TemplateError` without a chat template.
    """
    refuse_unknown(loading, [*signature(load_session).parameters, *LOADING], "load_engine")
    source = bundled_model() if model is None else model
    loaded, hf_tokenizer = load(source, tokenizer, device, dtype, trust_remote_code=trust_remote_code, **loading)
    # Made first, so that a missing template is reported before the model is probed.
    template = ChatTemplate(hf_tokenizer, template_options)
    causal = CausalModel(loaded, keep_attention=loading.get("attn_implementation") is not None)
    # Nobody else can change a model that was loaded here.
    watch = None if isinstance(source, str | Path) else ModelWatch(loaded)
    if watch is not None or loading.get("quantization_config") is not None:
        source = loaded  # The files do not have the quantised weights.

    def renew() -> None:
        nonlocal source, watch
        # The model was changed in memory, so its files no longer describe it.
        source, watch = loaded, ModelWatch(loaded)
        causal.renew()
        identity.cache_clear()

    def check() -> None:
        if watch is not None:
            watch.check()

    @cache
    def identity() -> ModelFingerprint:
        check()
        return take_fingerprint(causal, hf_tokenizer, template, source)

    if cache_bytes is None:
        cache_bytes = memory_bytes(causal.shape.device) // KV_SHARE
    engine = LocalEngine(
        causal,
        hf_tokenizer,
        identity=identity,
        check=check,
        cache_bytes=cache_bytes,
        pass_tokens=chunk_tokens,
        renew=renew,
    )
    return Session(engine, name=name_of(model), template=template, probe=causal.seconds_per_token)
