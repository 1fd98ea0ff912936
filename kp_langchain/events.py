"""What happens to packs in the run of a retriever, as LangChain's custom events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.callbacks.manager import handle_event

from kp_core.events import subscribe

__all__ = ["Run", "telling"]

Run: TypeAlias = CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun

_run: ContextVar[Run | None] = ContextVar("run", default=None)


@contextmanager
def telling(run: Run | None) -> Iterator[None]:
    """Pass events of this thread on to the callbacks of `run`: `on_custom_event(name, counts)`.

    The name is that in the debug log (`kp_event`). What happens in the background belongs to no run; the log and
    `kp_core.events.subscribe` have it. Of a model, `on_llm_end` tells the counts (`response_metadata["kp"]`), since
    LangChain tells a model that streams nothing of its run.
    """
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def _tell(name: str, counts: Mapping[str, float | str]) -> None:
    if (run := _run.get()) is not None:
        about = {"run_id": run.run_id, "tags": run.tags, "metadata": run.metadata}
        handle_event(run.handlers, "on_custom_event", "ignore_custom_event", name, dict(counts), **about)


subscribe(_tell)
