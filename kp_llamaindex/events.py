"""`PackEvent`: what happened to packs, as an event of LlamaIndex's instrumentation."""

from __future__ import annotations

from collections.abc import Mapping

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent

from kp_core.events import subscribe

__all__ = ["PackEvent"]

_dispatcher = get_dispatcher(__name__)


class PackEvent(BaseEvent):
    """Packs were found, compiled, read or synchronised, or KV was evicted; also in the background."""

    name: str = Field(description="The name in the debug log (`kp_event`), e.g. `packs found`.")
    counts: dict[str, float | str] = Field(description="The counts of the event, e.g. `units` and `packs`.")

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "PackEvent"


def _tell(name: str, counts: Mapping[str, float | str]) -> None:
    _dispatcher.event(PackEvent(name=name, counts=dict(counts)))


subscribe(_tell)
