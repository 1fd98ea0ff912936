"""One table of all options of a generation: the default of each, its meaning, and who may set it."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from kp_core.errors import OptionError, gone
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import Mismatch, PackView, Unresolved
from kp_core.plan.composer import Composer, ExactComposer, composer_of
from kp_core.plan.plan import Sampling, number
from kp_core.prompt.conversation import Message, Placement
from kp_core.steering import AskedSteering, Scope
from kp_core.tools import AnswerShape, Tool, ToolChoice

CompiledFor: TypeAlias = Sequence[Message] | Literal["user", "system"]
Keep: TypeAlias = Literal["used_twice", "always", "never"]

_EXACT = ExactComposer()
_RENAMED: Mapping[str, Sequence[str]] = {
    "bank": ("fact_store", "namespaces"),
    "banks": ("namespaces",),
    "foreign": ("mismatch",),
    "format": ("response_schema",),
    "inside": ("compiled_for",),
    "json_mode": ("response_schema",),
    "k": ("similarity_top_k",),
    "num_predict": ("max_tokens",),
    "top_k": ("k", "similarity_top_k"),
}
"""Names of an earlier release or of another library, each with the names that may replace it."""
_INSTEAD: Mapping[str, tuple[str, str]] = {
    "n": ("seed", "A call gives one answer: call once for each, with another `seed`; the prompt is computed once."),
    "view": ("seed", "A model takes `store=` and `namespaces=` when it is made; only a session takes a view."),
    "search_kwargs": ("k", "Give what is in it by name, e.g. `k=4`."),
}
"""Options of other libraries and classes: an option of those that have something instead, and the hint for them."""

ABOUT: Mapping[str, str] = {
    "max_tokens": "Most tokens to generate; by default 512, or fewer where the context ends sooner.",
    "temperature": "How freely tokens are chosen; 0 (default) is greedy.",
    "top_p": "Choose among the likeliest tokens that together have this probability; 1 (default) is all.",
    "top_k": "Choose among so many of the likeliest tokens; 0 (default) is all.",
    "repetition_penalty": "Above 1 (default), tokens that stood before become less likely.",
    "seed": "Equal seeds choose equal tokens. Without one, each call with a `temperature` draws anew.",
    "stop": "Strings that end the answer and are left out of it; not of answers with a schema, and forced calls.",
    "logprobs": "Return the log-probability of each generated token, before temperature, penalties and grammar.",
    "top_logprobs": (
        "Also return this many of the likeliest tokens in the place of each, at most 20. It switches `logprobs` on."
    ),
    "view": "Resolves handles in the messages; without it they stay text.",
    "packs": "Packs, or handles that resolve, to place at the head of the system message.",
    "placement": (
        "`in_place`: packs stand where their handles stood. `system`: all stand at the head of the system message."
    ),
    "composer": "Makes the KV of packs that do not stand where they were compiled.",
    "keep": (
        "Whether KV of packs behind others and of a conversation from its beginning on is kept in the store of the "
        "view: `used_twice` (from the second time on, in the background), `always` (before the call returns), or "
        "`never`."
    ),
    "keep_in": (
        "The namespace of this conversation, where KV behind its own words is kept; by default the view's only one."
    ),
    "mismatch": (
        "A pack of another model, or of the same one in other numerics: `error`, or `rebuild` it from its text."
    ),
    "unresolved": (
        "A handle that brings no pack: raise an `error` (for production; not for roles that are not trusted), `warn` "
        "(log it once, and send it as text), or send it as `text`."
    ),
    "steering": (
        "What to add to cached values: a `Steering`, or `(steering, alpha)`; an alpha of `None` is the default."
    ),
    "scope": (
        "What is steered: `pack`, `system`, `prompt` or `last_token`; by default the system message with the "
        "packs in it, or packs alone where some stand elsewhere."
    ),
    "thinking": "Switches thinking on or off, for templates that can.",
    "timeout": "Seconds after which a generation ends with `GenerationTimeoutError`.",
    "tools": "What the model may call.",
    "tool_choice": "`auto`, `any`, `none`, or the name of the tool to call.",
    "parallel_tool_calls": "Several calls in one answer; by default only with `tool_choice='auto'`.",
    "response_schema": (
        "The answer is JSON of this schema or Pydantic class (`True`: any object), held to it by a grammar."
    ),
    "reuse": "`False` prefills everything and keeps nothing: the slow way, to compare with.",
    "cancel": "Set it from any thread to end the generation after the token in progress.",
}
"""What each option is for."""
_CHOICES = {
    "mismatch": get_args(Mismatch),
    "unresolved": get_args(Unresolved),
    "keep": get_args(Keep),
}
PER_CALL = ("tools", "tool_choice", "parallel_tool_calls", "response_schema", "reuse")
"""Options that only a call has. All others but those of the core are settings of a model, too."""
OF_THE_CORE = ("view", "cancel")
"""Options that adapters set themselves."""


@dataclass(frozen=True)
class Request(Sampling):
    """All options of one generation. `Request.of` makes one from options by name, and refuses unknown ones.

    Raises `OptionError` for a wrong value.
    """

    view: PackView | None = None
    packs: Sequence[KnowledgePack | Handle | str] = ()
    placement: Placement = "in_place"
    composer: Composer = _EXACT
    keep: Keep = "used_twice"
    keep_in: str | None = None
    mismatch: Mismatch = "error"
    unresolved: Unresolved = "warn"
    steering: AskedSteering | None = None
    scope: Scope | None = None
    thinking: bool | None = None
    timeout: float | None = None
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    response_schema: Mapping[str, Any] | type | Literal[True] | None = None
    reuse: bool = True
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
            if self.timeout is not None and not number(self.timeout, "timeout") > 0:
                raise OptionError(f"Got timeout={self.timeout!r}; expected None or a number of seconds > 0.")
        except TypeError as error:
            raise OptionError(f"Got an option of the wrong type ({error}); `OPTIONS` names the types.") from error
        for name, attribute, expected in (("view", "source", "`store.view(...)`"), ("cancel", "is_set", "an event")):
            if (value := getattr(self, name)) is not None and not hasattr(value, attribute):
                raise OptionError(f"Got {name}={value!r}; expected {expected}, or None.")
        for name, names in _CHOICES.items():
            if (choice := getattr(self, name)) not in names:
                choices = " or ".join(map(repr, names))
                raise OptionError(f"Got {name}={choice!r}; expected {choices}.{gone(name, choice)}")
        self._check_lists()
        composer: object = self.composer
        if isinstance(composer, str):
            object.__setattr__(self, "composer", composer_of(composer))
        if not isinstance(self.composer, Composer):
            raise OptionError(
                f"Got composer={self.composer!r}; expected a composer: its name, or a `kp_core.Composer` such "
                "as `kp_core.ExactComposer()`."
            )

    def _check_lists(self) -> None:
        for name in ("packs", "tools"):
            if isinstance(value := getattr(self, name), str | Mapping) or not isinstance(value, Iterable):
                raise OptionError(f"Got {name}={value!r}; expected a list.")

    @classmethod
    def of(cls, options: Mapping[str, Any], base: Request | None = None) -> Request:
        """A request with these `options`; the others come from `base` or are defaults. `None` means the default.

        Raises `OptionError` for an unknown name, with the closest known one.
        """
        checked = checked_options(options, "A request")
        return cls(**checked) if base is None else replace(base, **checked)

    @property
    def sampling(self) -> Sampling:
        """The part of the options that says how the next token is chosen."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return Sampling(**{**values, "stop": self.stops})

    @property
    def stops(self) -> Sequence[str]:
        """`stop`, unless the answer is JSON, which ends where its schema does and may hold any of these."""
        return () if self.shape.schema is not None or self.shape.is_forced else self.stop

    @cached_property
    def shape(self) -> AnswerShape:
        """The shape that the answer must have. Raises `PromptError` for contradictory tools and schemas."""
        return AnswerShape.of(
            self.tools, self.tool_choice, schema=self.response_schema, parallel=self.parallel_tool_calls
        )


OPTIONS: Mapping[str, Field[Any]] = {option.name: option for option in fields(Request)}
"""All options by name, with their defaults. The fields and checks of both adapters and the page of options are made of
this table, `ABOUT`, `PER_CALL` and `OF_THE_CORE`."""


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, hints: Mapping[str, str] = {}) -> None:
    """Raise `OptionError` for the first of `given` that is not `known`. The message says what to write instead.

    `hints` say it for some names.
    """
    names = sorted(set(known))
    for name in given:
        if name not in names:
            renamed = [new_name for new_name in _RENAMED.get(name, ()) if new_name in names]
            suggestions = renamed or difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {suggestions[0]!r}?" if suggestions else f"Expected some of: {', '.join(names)}."
            if name in _INSTEAD and _INSTEAD[name][0] in names:
                hint = _INSTEAD[name][1]
            hint = hints.get(name) or gone(name).strip() or hint
            raise OptionError(f"{what} has no option {name!r}. {hint}")


def checked_options(options: Mapping[str, Any], what: str, known: Iterable[str] = OPTIONS) -> dict[str, Any]:
    """`options` with the default in place of `None`; raises as `refuse_unknown`, and for values of earlier releases."""
    refuse_unknown(options, known, what)
    for name, value in options.items():
        if isinstance(value, str) and (hint := gone(name, value)):
            raise OptionError(f"Got {name}={value!r}.{hint}")
    return {
        name: OPTIONS[name].default if value is None and name in OPTIONS else value for name, value in options.items()
    }
