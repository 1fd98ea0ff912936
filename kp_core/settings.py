"""Settings of a chat model, shared by both adapters: its constructor fields and the defaults of its options.

Needs pydantic, which both frameworks install; nothing else in the core imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    create_model,
    field_validator,
    model_validator,
)

from kp_core.bundled import BUNDLED_MODEL
from kp_core.engines.shared import session_of, shared_engine
from kp_core.errors import PackError, PromptError
from kp_core.events import warn_once
from kp_core.packs.handle import Handle
from kp_core.packs.store import open_packs
from kp_core.packs.view import TRUSTED_ROLES, Packs, PackView
from kp_core.plan.request import ABOUT, OF_THE_CORE, OPTIONS, PER_CALL, Request, checked_options
from kp_core.session.session import Session
from kp_core.steering import as_steering

logger = logging.getLogger(__name__)
MODEL_OPTIONS = tuple(name for name in OPTIONS if name not in (*PER_CALL, *OF_THE_CORE))
"""Options that are model fields as well as call options."""
CALL_OPTIONS = tuple(name for name in OPTIONS if name not in OF_THE_CORE)
"""Options of a call."""

GIVEN = ("composer", "engine", "steering", "store")
"""Fields that are objects: they are not serialised, and must be passed again."""

_ROLES = {
    "human": "user",
    "ai": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
}

# Pydantic checks simple types; objects check themselves. The field `packs` takes handles, not packs.
_PACKS = tuple[Annotated[str, BeforeValidator(lambda name: str(name) if isinstance(name, Handle) else name)], ...]
_TYPES = get_type_hints(Request) | {"composer": Any, "steering": Any, "packs": _PACKS, "stop": list[str]}
_Engine = Annotated[Session | None, BeforeValidator(lambda given: None if given is None else session_of(given))]
_Roles = Annotated[tuple[str, ...], AfterValidator(lambda names: tuple(sorted({*map(core_role, names)})))]
_Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]
_ALIASES = {"stop": AliasChoices("stop", "stop_sequences")}
_FIELDS: dict[str, Any] = {
    name: (
        _TYPES[name] | None,
        Field(
            default=[] if name == "stop" else OPTIONS[name].default,
            description=ABOUT[name],
            validation_alias=_ALIASES.get(name),
            exclude=name in GIVEN,
            repr=name not in GIVEN,
        ),
    )
    for name in MODEL_OPTIONS
}
_Options: Any = create_model("_Options", **_FIELDS)


class EngineSettings(BaseModel):
    """The engine of a model (or the model's name), its pack store, and the trusted roles."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    engine: _Engine = Field(default=None, exclude=True, repr=False, description="A `Session` or an `Engine`.")
    model: str | None = Field(
        default=None,
        validation_alias=AliasChoices("model", "model_name"),
        description="A Hugging Face id or folder; without it and an engine, the bundled SmolLM2-135M-Instruct.",
    )
    dtype: str | None = None
    device: str | None = None
    base_url: str | None = Field(
        default=None, description="The address of a server of `kp serve`; `model` is then its tokenizer's folder or id."
    )
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False, description="The key for `base_url`.")
    store: Packs | None = Field(
        default=None, exclude=True, description="Where handles resolve: a `PackStore`, its path, or what acts as one."
    )
    trusted_roles: _Roles = Field(
        default=tuple(sorted(TRUSTED_ROLES)),
        description="Roles whose messages may bring packs, by the framework's names (`human`) or the core's (`user`).",
    )

    @field_validator("store", mode="before")
    @classmethod
    def _open_store(cls, store: Any) -> Any:  # noqa: ANN401
        try:
            return None if store is None else open_packs(store)
        except PackError as error:
            raise ValueError(str(error)) from error

    def __getstate__(self) -> dict[Any, Any]:
        # LlamaIndex would leave out what cannot be pickled, and say so only in the log.
        for part in (self.engine, self.store):
            if part is not None:
                part.__reduce__()
        return super().__getstate__()

    @property
    def model_name(self) -> str:
        """Name of the model in metadata and traces."""
        return self.model or BUNDLED_MODEL if self.engine is None else self.engine.name

    def _engine(self, model: str | None = None) -> Session:
        if self.engine is not None and model in (None, self.model_name):
            return self.engine
        key = None if self.api_key is None or self.base_url is None else self.api_key.get_secret_value()
        return shared_engine(model or self.model, self.dtype, self.device, self.base_url, key)


class ModelSettings(EngineSettings, _Options):  # type: ignore[misc]  # a table makes its fields
    """Settings of a chat model: `EngineSettings`, the namespaces it may read, and one field per option.

    Give an `engine`, a `model`, which is loaded on first use, once per process, or the `base_url` of a server. Handles
    resolve in `store`, if they are in the `namespaces` and in messages of `trusted_roles`; all others stay text and are
    logged. Every option of `kp_core.Request` that concerns a model (`temperature`, `stop`, `packs`, `composer`, ...) is
    a field. A field of `None` has its default. Options of a call override the fields.

    Raises `OptionError`, a `TypeError`, for an unknown field or option of a call, with the closest name, and
    `ModelError` for an invalid engine.
    """

    namespaces: _Names = Field(
        default=(), description="Namespaces whose handles resolve; required with `store`. One may be a string."
    )

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(**self._checked(settings))

    @classmethod
    def _checked(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        aliases = (getattr(field.validation_alias, "choices", ()) for field in cls.model_fields.values())
        return checked_options(given, cls.__name__, (*cls.model_fields, *(name for names in aliases for name in names)))

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if (self.store is None) != (not self.namespaces):
            raise ValueError(
                f"Got store={self.store!r} and namespaces={self.namespaces!r}; expected both or neither. A handle "
                "resolves only in a namespace that the model is given, e.g. `namespaces=['default']`."
            )
        if (self.engine is not None or self.base_url) and (self.dtype or self.device):
            raise ValueError("Got an engine or a base_url together with dtype or device; the engine has its own.")
        if self.engine is not None and self.base_url:
            raise ValueError("Got an engine and a base_url; expected one of them.")
        self._view()  # Creating the view checks the namespaces.
        as_steering(self._defaults().steering)
        return self

    def _view(self) -> PackView | None:
        return None if self.store is None else self.store.view(*self.namespaces, trusted_roles=self.trusted_roles)

    def reading(self) -> tuple[Session, PackView | None]:
        """Return what answers, and the packs that it may use."""
        view = self._view()
        return self._engine(), view and replace(view, mismatch=self._defaults().mismatch)

    def _set(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MODEL_OPTIONS}

    def _defaults(self) -> Request:
        """Return the request of a call without options; checks it."""
        return Request.of(self._set())

    def remembering(self) -> dict[str, Any]:
        """Return extra options for an agent's memory: keep computed KV, unless the model sets `keep`."""
        if len(self.namespaces) > 1 and self.keep_in is None and self.keep != "never":
            message = "A restart computes conversations anew. Say which namespace keeps them, `keep_in=...`, of: %s."
            warn_once(logger, message, ", ".join(self.namespaces))
        return {} if "keep" in self.model_fields_set and self.keep is not None else {"keep": "always"}

    def _asked(self, options: Mapping[str, Any], *also: str) -> dict[str, Any]:
        """Merge the settings with the `options` of one call; `also` are options of this model only."""
        call_options = checked_options(options, type(self).__name__, (*CALL_OPTIONS, *also))
        if "tool_choice" in call_options:
            call_options["tool_choice"] = core_choice(call_options["tool_choice"])
        return {"view": self._view(), **self._set(), **call_options}


def core_role(name: str) -> str:
    """Return the core's name of a role: `human` is `user`, `ai` is `assistant`; other names stay."""
    return _ROLES.get(name, name)


def core_choice(choice: object) -> str:
    """Return the core's name of a tool choice in the form of a framework or of OpenAI.

    `"required"` and `True` are `"any"`; a mapping names the function. Raises `PromptError` if it names none.
    """
    if isinstance(choice, bool) or choice == "required":
        return "any" if choice else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        tool_name = function.get("name", choice.get("type")) if isinstance(function, Mapping) else None
        if tool_name in (None, "function"):
            raise PromptError(f"Got tool_choice={choice!r}; expected 'auto', 'any', 'none' or the name of a tool.")
        choice = tool_name
    return "auto" if choice is None else str(choice)
