"""Keeps one session for each model in a process, so that an adapter created ten times loads the weights once."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kp_core.bundled import check_reachable, needing
from kp_core.engines.base import Engine
from kp_core.engines.session import Session
from kp_core.errors import MissingDependencyError, ModelError, UnsupportedModelError

__all__ = ["load_engine", "session_of", "shared_engine"]

logger = logging.getLogger(__name__)

_sessions: dict[tuple[str | None, ...], Session] = {}
_loading = threading.Lock()


def load_engine(model: Any = None, *, engine: str | None = None, **settings: Any) -> Session:  # noqa: ANN401
    """A session for a Hugging Face id, a folder or a model object; see `kp_core.engines.hf.loading.load_session`.

    Without `model`, loads the bundled SmolLM2-135M-Instruct. `model` may also be any `Engine`. With `engine="llama"`,
    llama.cpp runs a GGUF file (`kp_core.engines.llama.loading.load_session`). It is also the default for such a file if
    it can run it and knows all `settings`; `engine="hf"` prevents that. `engine` may name a function that makes an
    engine from `model` and `settings`, as `package.module:function`, or be the address of a server (`http://…`, see
    `kp_serve.engine.VLLMEngine`). `model` is then the folder or id of the tokenizer, needed only if it differs from the
    one that the server names, and `api_key` may be given. Raises `ModelError` for any other `model` or `engine` and for
    a `dtype` with a server, and `MissingDependencyError` for an address when `kp_serve` is not installed.
    """
    session = _loaded(model, engine, settings)
    if (model is None or isinstance(model, str | Path)) and session.loads is None:
        session.loads = partial(load_engine, model, engine=engine, **settings)
    return session


def _loaded(model: Any, engine: str | None, settings: Mapping[str, Any]) -> Session:  # noqa: ANN401
    if engine is not None and engine.startswith(("http://", "https://")):
        if "dtype" in settings:
            raise ModelError(f"Got dtype={settings['dtype']!r} for the server {engine}; it has its own.")
        with needing("Asking a server of `kp serve` needs the package kp_serve", "serve"):
            make = importlib.import_module("kp_serve.engine").VLLMEngine
        server = make(engine, tokenizer=model, **settings)
        return Session(server, name=server.name)
    if engine == "llama":
        from kp_core.engines.llama.loading import load_session as load_gguf

        return load_gguf(model, **settings)
    if engine not in (None, "hf"):
        module, _, name = engine.partition(":")
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ModelError(
                f"Got engine={engine!r}; expected 'package.module:function', 'llama', 'hf', or an address ({error})."
            ) from error
        return session_of(make(model, **settings))
    if isinstance(model, Session | Engine):
        return session_of(model)
    if isinstance(model, str | Path):
        if engine is None and Path(model).is_file() and (session := _from_file(model, settings)):
            return session
        check_reachable(model, settings.get("revision"))  # Before the libraries load, which takes seconds.
    from kp_core.engines.hf.loading import load_session

    return load_session(model, **settings)


def _from_file(file: str | Path, settings: Mapping[str, Any]) -> Session | None:
    """A session with a GGUF file in llama.cpp.

    `None` if llama.cpp is not installed or cannot run the model, which is logged, or if settings are not of it.
    """
    from kp_core.engines.llama.loading import SETTINGS, load_session

    given = {name: value for name, value in settings.items() if value is not None}
    if given.keys() <= SETTINGS and given.get("dtype") != "auto":
        try:
            return load_session(file, **given)
        except (MissingDependencyError, UnsupportedModelError) as error:
            logger.warning("%s is unpacked, and runs slower than in llama.cpp. %s", file, error)
    return None


def session_of(engine: object) -> Session:
    """`engine` itself if it is a session, else a session on it. Raises `ModelError` if it is no engine."""
    if isinstance(engine, Session):
        return engine
    if not isinstance(engine, Engine):
        raise ModelError(
            f"Got a {type(engine).__name__} as engine; expected what `kp_core.load_engine(...)` gives, or an object "
            "with `identity`, `tokenizer`, `max_positions`, `supports`, `lacks`, `run` and `kv`."
        )
    return Session(engine)


def shared_engine(
    model: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
) -> Session:
    """The session of this process for these settings, created on first use."""
    key = (model, dtype, device, base_url, api_key)
    with _loading:
        if key not in _sessions:
            server_settings = {"engine": base_url, "api_key": api_key}
            _sessions[key] = load_engine(model, **server_settings if base_url else {"dtype": dtype, "device": device})
        return _sessions[key]
