"""The fields of `KnowledgePackLLM`: checked when it is made, and written down without weights or stores."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal, Self

from llama_index.core.bridge.pydantic import Field, field_serializer, field_validator, model_validator

from kp_core import PackStore, PackView
from kp_core.packs.view import TRUSTED_ROLES, Packs
from kp_core.steering import as_steering
from kp_llamaindex.messages import core_role
from kp_llamaindex.tools import ToolCallingLLM

__all__ = ["SAMPLING", "LLMSettings"]

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "timeout")
"""Fields that say how tokens are chosen, and for how long."""

_GIVEN = "given"


class LLMSettings(ToolCallingLLM):
    """What a `KnowledgePackLLM` is made with.

    In serialised form a store is its path, an engine and a steering are marks that they have to be given again.
    """

    engine: Any = Field(default=None, repr=False, description="A `kp_core.Engine`.")
    model: str | None = Field(default=None, description="A Hugging Face id or folder.")
    dtype: str | None = None
    device: str | None = None
    store: Packs | None = Field(default=None, description="Where handles resolve: a `PackStore`, or its path.")
    namespaces: tuple[str, ...] = Field(default=(), description="Namespaces whose handles resolve.")
    packs: tuple[str, ...] = Field(
        default=(), description="Handles whose packs stand at the head of the system message in every call."
    )
    trusted_roles: frozenset[str] = Field(
        default=TRUSTED_ROLES, description="Roles whose messages may bring packs, by LlamaIndex's names or the core's."
    )
    placement: Literal["in_place", "system"] = Field(
        default="in_place", description="Packs stand where their handle stood, or at the head of the system message."
    )
    compact: bool = Field(
        default=False,
        description="Tool exchanges that brought nothing but packs shrink to the latest call, and prompts stay short.",
    )
    mismatch: Literal["error", "rebuild"] = "error"
    thinking: bool | None = None
    steering: Any = Field(
        default=None,
        repr=False,
        description="A `kp_core.Steering` as it is, or a pair of it and alpha; `None` is its default strength.",
    )
    scope: Literal["pack", "system", "prompt", "last_token"] | None = Field(
        default=None,
        description="What is steered; by default the system head with its packs, or packs that stand elsewhere.",
    )
    pack_budget: int | None = Field(
        default=None,
        ge=0,
        description="Positions kept for packs, which prompt helpers cannot see; by default half of them with a store.",
    )
    temperature: float | None = Field(default=None, description="0 or `None` is greedy.")
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = Field(
        default=None, description="Seconds after which a call raises `GenerationTimeoutError`."
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _take_engine(cls, engine: Any) -> Any:  # noqa: ANN401
        if isinstance(engine, str):
            raise ValueError(  # noqa: TRY004 - pydantic collects these
                "Got the description of an LLM that was made with an engine of its own; expected that engine: "
                "`KnowledgePackLLM.from_dict(data, engine=engine)`."
            )
        return engine

    @field_validator("steering", mode="before")
    @classmethod
    def _take_steering(cls, steering: Any) -> Any:  # noqa: ANN401
        if steering == _GIVEN:
            raise ValueError(
                "Got the description of an LLM that was made with a steering; expected that steering, so that it does "
                "not speak plainly in secret: `KnowledgePackLLM.from_dict(data, steering=steering)`."
            )
        as_steering(steering)  # Refused here, not at the first call.
        return steering

    @field_validator("store", mode="before")
    @classmethod
    def _open_store(cls, store: Any) -> Any:  # noqa: ANN401
        return PackStore(store) if isinstance(store, str | PathLike) else store

    @field_validator("namespaces", mode="before")
    @classmethod
    def _list_namespaces(cls, names: Any) -> Any:  # noqa: ANN401
        return (names,) if isinstance(names, str) else names

    @field_validator("trusted_roles")
    @classmethod
    def _name_roles(cls, roles: frozenset[str]) -> frozenset[str]:
        return frozenset(core_role(role) for role in roles)

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        if (self.store is None) != (not self.namespaces):
            raise ValueError(
                f"Got store={self.store!r} and namespaces={self.namespaces!r}; expected both or neither. A handle "
                "resolves only in a namespace that the model is given, e.g. `namespaces=['default']`."
            )
        if self.engine is not None and (self.dtype or self.device):
            raise ValueError("Got an engine together with dtype or device; the engine has its own.")
        self._view()  # Namespaces are checked where they are made.
        return self

    @field_serializer("engine", "steering")
    def _describe_given(self, given: Any) -> str | None:  # noqa: ANN401
        return None if given is None else _GIVEN

    @field_serializer("store")
    def _describe_store(self, store: Packs | None) -> str | None:
        return None if store is None else str(getattr(store, "path", store))

    @field_serializer("trusted_roles")
    def _describe_roles(self, roles: frozenset[str]) -> list[str]:
        return sorted(roles)

    def _view(self) -> PackView | None:
        if self.store is None:
            return None
        return self.store.view(*self.namespaces, trusted_roles=self.trusted_roles)
