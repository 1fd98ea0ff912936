"""What may be asked of an engine, and what comes back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypedDict

from torch import Tensor

from kp_core.compose import Composer
from kp_core.errors import SamplingError
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackView
from kp_core.prompt.prompt import Prompt
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import Placement
from kp_core.steering import AskedSteering, Scope
from kp_core.tools import Tool, ToolCall, ToolChoice
from kp_core.usage import Usage

__all__ = ["CompiledFor", "FinishReason", "Generation", "Limit", "Request", "Sampling", "sampling_of"]

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "cancelled"]
CompiledFor: TypeAlias = Sequence[Message] | Literal["user", "system"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults are greedy. Raises `SamplingError` for a value out of range."""

    max_tokens: int | None = None
    """Most tokens to generate; `None` is 512, or fewer where the context ends sooner."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    """Strings that end the answer and are left out of it; they may span tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        checks = {
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "None or an integer >= 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            "top_p": (0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (self.top_k >= 0, "an integer >= 0"),
            "repetition_penalty": (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number > 0",
            ),
            "stop": (all(self.stop), "strings that are not empty"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise SamplingError(f"Got {name}={getattr(self, name)!r}; expected {expected}.")


class Request(TypedDict, total=False):
    """What may be asked of one generation, beside its messages."""

    view: PackView | None
    """Resolves handles in the messages; without it they stay text."""
    packs: Sequence[KnowledgePack | str]
    """Packs, or handles that `view` resolves, to place at the head of the system message."""
    placement: Placement
    """`"in_place"` (default): a pack stands where its handle stood. `"system"`: all packs go to the system head."""
    compact: bool
    """`True`: tool exchanges that brought nothing but packs shrink to the latest call and one short line, so that a
    prompt stays as long as it was however often an agent searched. Placed in place, their packs stand at the end of the
    message that the calls answer."""
    composer: Composer
    """What packs' KV may stand for; exact by default."""
    mismatch: Literal["error", "rebuild"]
    """What to do with a pack of another model: refuse (default), or use its text and recompute."""
    steering: AskedSteering | None
    """What to add to cached values: a `Steering` as it is, or `(steering, alpha)`; an alpha of `None` is the default
    strength, which is lower beside packs."""
    scope: Scope | None
    """What is steered; without it the system head with the packs in it, or packs alone where some stand elsewhere."""
    tools: Sequence[Tool | Mapping[str, Any]]
    """What the model may call, each as `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    tool_choice: ToolChoice
    parallel_tool_calls: bool | None
    """Several calls in one answer; by default only with `tool_choice="auto"`."""
    response_schema: Mapping[str, Any] | Literal[True] | None
    """The answer is JSON of this schema (`True`: any object), held to it by a grammar."""
    thinking: bool | None
    """Switches thinking on or off, for templates that can."""
    reuse: bool
    """`False` prefills everything and leaves nothing behind: the slow way, to compare with."""
    deterministic: bool
    """`True` reuses prefilled KV only, never decoded KV, so that a replayed conversation is bit-identical."""
    timeout: float | None
    """Seconds after which the generation ends with `GenerationTimeoutError`; looked at after each chunk and token."""
    cancel: threading.Event | None
    """Set it from any thread to end the generation after the token in progress."""
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    stop: Sequence[str]


@dataclass(frozen=True)
class Limit:
    """Whether a generation must end: it was cancelled, or its time is up."""

    cancel: threading.Event | None
    began: float
    """On the clock of `time.perf_counter`."""
    timeout: float | None
    """Seconds."""

    @classmethod
    def of(cls, request: Mapping[str, Any], began: float) -> Limit:
        """The limit of a request that began at `began`; raises `SamplingError` for a timeout that is no time."""
        timeout = request.get("timeout")
        if timeout is not None and not timeout > 0:
            raise SamplingError(f"Got timeout={timeout!r}; expected None or a number of seconds > 0.")
        return cls(request.get("cancel"), began, timeout)

    def is_set(self) -> bool:
        """Whether it must end; the same question as to an event."""
        return self.is_over or (self.cancel is not None and self.cancel.is_set())

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.timeout is not None and self.spent > self.timeout

    @property
    def spent(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self.began


def sampling_of(request: Mapping[str, object]) -> Sampling:
    """The sampling part of a request."""
    return Sampling(**{field.name: request[field.name] for field in fields(Sampling) if field.name in request})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Generation:
    """One answer: its text (handles, stop strings, reasoning and calls removed), its tokens, why it ended, its cost."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt: Prompt
    first_logits: Tensor | None = field(default=None, compare=False, repr=False)
    """Logits behind the prompt, `(vocabulary,)`; `None` when the generation was cancelled before."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that were completed, in order."""
    reasoning: str = ""
    """What stood in the `<think>` block."""
