"""The options with which vLLM is started to serve packs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kp_core.packs.codec import Compression
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.rope import Rope

__all__ = ["arguments", "served_identity"]


def served_identity(model: str | Path, dtype: str | None = None) -> ModelFingerprint:
    """The fingerprint of a model, a folder or an id, as vLLM serves it. `dtype` defaults to that of its configuration.

    Raises `ModelError` and `TemplateError` as `kp_core.engines.hf.identity.identity_of` does.
    """
    from kp_core.engines.hf.identity import checkpoint_folder, identity_of

    identity = identity_of(model)
    if dtype in (None, "auto"):
        config = json.loads((checkpoint_folder(model) / "config.json").read_bytes())
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        dtype = "bfloat16" if dtype == "float32" else dtype  # vLLM's "auto" does so, too.
    return replace(identity, dtype=str(dtype), engine="vllm", passes="any")


def arguments(  # noqa: PLR0913 - what one server is
    model: str,
    store: str,
    identity: ModelFingerprint,
    host: str,
    port: int,
    *,
    sealed: bool = False,
    compress: Compression = "lossless",
    rope: Rope | None = None,
    packets: bool = False,
) -> list[str]:
    """The options of `vllm serve` that serve a model with the packs of `store`.

    With `sealed`, the server reads only entries with a MAC of its key. `compress` is how it stores KV; it reads both
    ways. With `rope`, it also moves packs. With `packets`, it takes embeddings beside tokens, but only from its own
    middleware.
    """
    import torch

    extra = {"store": str(store), "identity": identity.to_dict(), "sealed": sealed, "compress": compress}
    transfer = {
        "kv_connector": "PackConnector",
        "kv_connector_module_path": "kp_serve.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra if rope is None else extra | {"rope": rope.to_dict()},
    }
    options = {
        "--host": host,
        "--port": str(port),
        "--dtype": identity.dtype,
        "--served-model-name": Path(model).resolve().name if Path(model).is_dir() else model,
        "--middleware": "kp_serve.middleware.PackMiddleware",
        "--kv-transfer-config": json.dumps(transfer),
        # This backend reads the grammars that our clients send.
        "--structured-outputs-config": json.dumps({"backend": "guidance"}),
    }
    flags = ["--enable-prompt-tokens-details", *([] if torch.cuda.is_available() else ["--enforce-eager"])]
    flags += ["--enable-prompt-embeds"] if packets else []
    return ["--model", model, *(part for pair in options.items() for part in pair), *flags]
