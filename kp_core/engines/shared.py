"""One engine per model and process: adapters that are made ten times load the weights once."""

from __future__ import annotations

import threading

from kp_core.engines.base import Engine

__all__ = ["loaded_engine", "shared_engine"]

_engines: dict[tuple[str | None, str | None, str | None], Engine] = {}
_loading = threading.Lock()


def shared_engine(model: str | None = None, dtype: str | None = None, device: str | None = None) -> Engine:
    """The engine this process keeps for `(model, dtype, device)`, loaded when it is first asked for."""
    key = (model, dtype, device)
    with _loading:
        if key not in _engines:
            from kp_core.engines.hf import HFEngine

            _engines[key] = HFEngine(model, dtype=dtype, device=device)
        return _engines[key]


def loaded_engine(model: str | None = None, dtype: str | None = None, device: str | None = None) -> Engine | None:
    """As `shared_engine`, but `None` where that would have to load; never waits."""
    return _engines.get((model, dtype, device))
