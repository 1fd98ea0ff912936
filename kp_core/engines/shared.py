"""Keeps one session for each model in a process, so that an adapter created ten times loads the weights once."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from kp_core.bundled import check_reachable
from kp_core.errors import MissingDependencyError, ModelError
from kp_core.plan.engine import Engine
from kp_core.plan.request import refuse_unknown
from kp_core.session.session import Session

logger = logging.getLogger(__name__)

ENGINES, FILES = "knowledge_packs.engines", "knowledge_packs.files"
"""Entry points of functions that make an engine or a session from `model` and settings, by the engine's name; and of
those that are given a model that is a file by default."""

_sessions: dict[tuple[str | None, ...], Session] = {}
_loading = threading.Lock()


def load_engine(model: Any = None, *, engine: str | None = None, **settings: Any) -> Session:  # noqa: ANN401
    """A session for a Hugging Face id, a folder or a model object; see `kp_core.engines.hf.loading.load_session`.

    Without `model`, loads the bundled SmolLM2-135M-Instruct. `model` may also be any `Engine`. `engine` is `"hf"`, or
    the name of an engine that a package brings (`ENGINES`), which has its own `settings`; or a function that makes one
    from `model` and `settings`, as `package.module:function`. A model's file goes to an engine for files (`FILES`) by
    default, if that can run it and knows all `settings`; `engine="hf"` prevents that. `engine` may also be the address
    of a server (`http://…`), for the engine named as its scheme (`kp_serve.engine.load_session`). `model` is then the
    folder or id of the tokenizer, needed only if it differs from the one that the server names, and `api_key` may be
    given. Raises `ModelError` for any other `model` or `engine`, and `OptionError` for settings that an engine lacks.
    """
    session = _loaded(model, engine, settings)
    if (model is None or isinstance(model, str | Path)) and session.loads is None:
        session.loads = partial(load_engine, model, engine=engine, **settings)
    return session


def _loaded(model: Any, engine: str | None, settings: Mapping[str, Any]) -> Session:  # noqa: ANN401
    if engine not in (None, "hf"):
        name, separator, _ = engine.partition("://")
        settings = {**settings, "base_url": engine} if separator else settings
        return session_of(_loader(name, settings)(model, **settings))
    if isinstance(model, Session | Engine):
        return session_of(model)
    if isinstance(model, str | Path):
        model = os.path.expanduser(model) if str(model).startswith("~") else model  # noqa: PTH111 - ids are no paths
        if engine is None and Path(model).is_file() and (session := _from_file(model, settings)):
            return session
        check_reachable(model, settings.get("revision"))  # Before the libraries load, which takes seconds.
    from kp_core.engines.hf.loading import load_session

    return load_session(model, **settings)


def _loader(engine: str, settings: Mapping[str, Any]) -> Callable[..., object]:
    """The function that makes the engine of that name. Refuses unknown `settings` of an installed engine."""
    installed = entry_points(group=ENGINES)
    module, _, name = engine.partition(":")
    try:
        if engine not in installed.names:
            make: Callable[..., object] = getattr(importlib.import_module(module), name)
            return make
        make = installed[engine].load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"Got engine={engine!r}; expected 'package.module:function', an address, or an installed engine: "
            f"{', '.join(sorted({'hf', *installed.names}))} ({error}). Engines of a package are found once it is "
            "installed; after an update in place, install it again."
        ) from error
    parameters = signature(make).parameters
    if all(parameter.kind != Parameter.VAR_KEYWORD for parameter in parameters.values()):
        refuse_unknown(settings, parameters, "load_engine")
    return make


def _from_file(file: str | Path, settings: Mapping[str, Any]) -> Session | None:
    """A session with the file of a model in an engine for such files.

    `None` if that is not installed or cannot run the model, which is logged, or if settings are not of it.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for entry in entry_points(group=FILES) if given.get("dtype") != "auto" else ():
        load = entry.load()
        if given.keys() <= signature(load).parameters.keys():
            try:
                return session_of(load(file, **given))
            except (MissingDependencyError, ModelError) as error:
                logger.warning("%s is unpacked, and runs slower than in %s. %s", file, entry.name, error)
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
