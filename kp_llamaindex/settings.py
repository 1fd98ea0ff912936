"""The fields of `KnowledgePackLLM`: checked when it is made, and written down without weights or stores."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from kp_core.engines.request import OPTIONS
from kp_core.settings import GIVEN, ModelSettings
from kp_llamaindex.tools import ToolCallingLLM

__all__ = ["LLMSettings"]

_GIVEN = "given"


class LLMSettings(ModelSettings, ToolCallingLLM):
    """What a `KnowledgePackLLM` is made with.

    In serialised form a store is its path; an engine, a steering, a composer and a store without a path are marks that
    they have to be given again.
    """

    pack_budget: int | None = Field(
        default=None,
        ge=0,
        description="Positions kept for packs, which prompt helpers cannot see; by default half of them with a store.",
    )

    @field_validator(*GIVEN, mode="before")
    @classmethod
    def _refuse_marks(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401
        if isinstance(value, str) and value == _GIVEN:
            name = info.field_name
            raise ValueError(
                f"Got the description of an LLM that was made with a {name} of its own; expected that {name}: "
                f"`KnowledgePackLLM.from_dict(data, {name}={name})`."
            )
        return value

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The fields as plain values."""
        marks = {name: None if getattr(self, name) is None else _GIVEN for name in GIVEN}
        if self.composer == OPTIONS["composer"].default:
            marks["composer"] = None
        if path := getattr(self.store, "path", None):
            marks["store"] = str(path)
        data: dict[str, Any] = super().custom_model_dump(handler, info)
        return data | marks | {"trusted_roles": sorted(self.trusted_roles)}
