"""What a request comes down to: a prompt, where the KV of each part of it comes from, and how its answer is made."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import get_args

from kp_core.compose import Composer, Region
from kp_core.errors import SamplingError, SteeringError
from kp_core.packs.kept import KeptKV
from kp_core.packs.view import PackView
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import Scope, Steering

__all__ = ["Limit", "Plan", "Region", "Sampling", "number", "plan_regions", "plan_steered"]

_GAP_TOKENS = 64
"""Text between two packs of one composed region; longer text is computed by itself."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults are greedy. Raises `SamplingError` for a value out of range."""

    max_tokens: int | None = None
    """Most tokens to generate; `None` is 512, or fewer where the context ends sooner."""
    temperature: float = 0.0
    """0 is greedy, and so is what is below 1e-5."""
    top_p: float = 1.0
    """Smallest share of probability that the tokens to choose from have together."""
    top_k: int = 0
    """How many of the likeliest tokens to choose from; 0 is all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that stood before become less likely."""
    seed: int | None = None
    """Equal seeds choose equal tokens."""
    stop: Sequence[str] = ()
    """Strings that end the answer and are left out of it; they may span tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        # Whoever gives an integer for a number means that number, and the library that samples asks for a float.
        for name in ("temperature", "top_p", "repetition_penalty"):
            object.__setattr__(self, name, number(getattr(self, name), name))
        checks = {
            "max_tokens": (self.max_tokens is None or _is_whole(self.max_tokens, 1), "None or an integer >= 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            "top_p": (0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (_is_whole(self.top_k, 0), "an integer >= 0"),
            "repetition_penalty": (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number > 0",
            ),
            "seed": (self.seed is None or _is_whole(self.seed, -(2**63), 2**64 - 1), "None or an integer of 64 bits"),
            "stop": (all(each and isinstance(each, str) for each in self.stop), "strings that are not empty"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise SamplingError(f"Got {name}={getattr(self, name)!r}; expected {expected}.")


def number(value: object, name: str) -> float:
    """`value` of an option as a float; raises `SamplingError` for what is no number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise SamplingError(f"Got {name}={str(value)[:40]!r} ({type(value).__name__}); expected a number.")


def _is_whole(value: object, least: int, most: int | None = None) -> bool:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) and (most is None or int(value) <= most)


@dataclass(frozen=True)
class Limit:
    """Whether a generation must end: it was cancelled, or its time is up."""

    cancel: threading.Event | None = None
    timeout: float | None = None
    """Seconds."""
    began: float = field(default_factory=time.perf_counter)
    """On the clock of `time.perf_counter`."""

    def is_set(self) -> bool:
        """Whether it must end; the same question as to an event."""
        return self.is_over or (self.cancel is not None and self.cancel.is_set())

    @property
    def may_end(self) -> bool:
        """Whether anything could end it."""
        return self.cancel is not None or self.timeout is not None

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.timeout is not None and self.spent > self.timeout

    @property
    def spent(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self.began


@dataclass(frozen=True)
class Plan:
    """Everything an engine needs to answer one request; made once, and printable (`Session.explain`)."""

    prompt: Prompt
    regions: tuple[Region, ...]
    sampling: Sampling = field(default_factory=Sampling)
    token_budget: int = 0
    """Most tokens of the answer; with 0 the prompt is prefilled and nothing more."""
    grammar: str | None = None
    """The Lark grammar that the answer is held to; with `opened`, the prompt has begun a `<think>` block."""
    opened: bool = False
    forced: tuple[int, ...] = ()
    """The answer itself, where its likelihood is asked for and not an answer."""
    packs: PackView | None = None
    """Where the KV of packs is read; what its namespaces own may be met in the prefix tree."""
    kept: KeptKV | None = field(default=None, compare=False)
    """Where the KV of chunks with packs is read that was computed before, and kept for later."""
    below: Plan | None = None
    """For a steered prompt: the plain one up to the end of its first steered region, which stands behind plain KV."""
    wanted: tuple[int, int] = (0, 0)
    """The tokens whose KV `Engine.kv` gives: from the regions as far as these go, the rest is computed behind them."""
    reuse: bool = True
    plain: Prompt | None = None
    """The canonical prompt, where `prompt` has tokens of a composer beside its own."""
    reordered: int = 0
    """Packs at another place among their neighbours than they were named at."""
    limit: Limit = field(default_factory=Limit, compare=False)

    def until(self, stop: int) -> Plan:
        """The plan for the first `stop` tokens of the prompt, to be prefilled and not answered."""
        regions = tuple(replace(each, stop=min(each.stop, stop)) for each in self.regions if each.start < stop)
        prompt = self.prompt.until(stop)
        return replace(self, prompt=prompt, regions=regions, token_budget=0, grammar=None, limit=Limit())

    @property
    def owners(self) -> frozenset[str]:
        """Whose KV the prompt may meet in the prefix tree."""
        packs = (*self.prompt.spans, *self.prompt.as_text)
        readable = () if self.packs is None else self.packs.namespaces
        return frozenset({self.prompt.owner, *readable, *(span.pack.namespace for span in packs)})

    @property
    def ends(self) -> frozenset[int]:
        """Where the states of recurrent layers are kept, if the model has any: packs and messages end there."""
        packs = (span.stop for span in self.prompt.spans)
        return frozenset({*self.prompt.breaks, *packs, *(region.stop for region in self.regions)})

    @property
    def labels(self) -> Mapping[int, tuple[int, int]]:
        """By where they begin, the ends and the labels of those regions that have one."""
        return {region.start: (region.stop, region.label) for region in self.regions if region.label}


def plan_regions(
    prompt: Prompt,
    packs: Collection[Span] = (),
    composed: Mapping[Span, Composer] | None = None,
    steered: Sequence[Region] = (),
) -> tuple[Region, ...]:
    """The regions of a prompt, in order: the spans of `packs` from their own KV, others `composed`.

    With `steered` ones all packs are computed: in them and behind them KV was made behind altered KV, and before them a
    plan without steering brings it (`Plan.below`).
    """
    made = steered or [
        Region(span.start, span.stop, "composed" if composer else "pack", (span,), composer)
        for span in prompt.spans
        if (composer := (composed or {}).get(span)) or span in packs
    ]
    regions: list[Region] = []
    done = 0
    for region in [*made, Region(len(prompt), len(prompt), "computed")]:
        if done < region.start:
            regions.append(Region(done, region.start, "computed"))
        if len(region):
            regions.append(region)
        done = region.stop
    return _composed(regions, prompt)


def _composed(regions: Sequence[Region], prompt: Prompt) -> tuple[Region, ...]:
    """`regions` with what one composer makes, and the few tokens between, as one: it is filled in one go."""
    made: list[Region] = []
    for region in regions:
        new = region
        if region.composer is not None:
            spans = region.spans
            gap = made[-1] if made and made[-1].source == "computed" and len(made[-1]) <= _GAP_TOKENS else None
            before = made[-1 if gap is None else -2] if len(made) > (gap is not None) else None
            first = region
            if before is not None and before.composer == region.composer:
                first, spans = before, (*before.spans, *spans)
                del made[-1 if gap is None else -2 :]
            elif gap is not None and before is not None and before.source == "pack":
                first = made.pop()  # What stands between a pack and this one joins it.
            ids = prompt.token_ids[first.start : region.stop]
            new = replace(region, start=first.start, spans=spans, token_ids=ids)
        made.append(new)
    return tuple(made)


def plan_steered(
    prompt: Prompt,
    steering: Steering | None,
    scope: Scope | None,
    *,
    answering: bool = True,
) -> tuple[Region, ...]:
    """The steered regions of `prompt`, in order: for its steered packs, and for what `steering` and `scope` ask.

    Without `scope` the system head is steered, packs in it included; the packs alone where some stand elsewhere or are
    steered themselves. Parts of one message form one region: all are computed, then all are altered. When `answering`,
    the last token of the prompt belongs to none: it is computed behind the altered KV, which is how the first token
    of the answer comes to see it.

    Raises `SteeringError` when the scope is not in the prompt, when two steerings would meet at one position, and for
    key deltas on more than one position.
    """
    if scope not in (None, *get_args(Scope)):
        raise SteeringError(f"Got the scope {scope!r}; expected one of {', '.join(get_args(Scope))}, or None.")
    parts = _parts(prompt, steering, scope, len(prompt) - 1 if answering else len(prompt))
    for part in parts:
        if part.steering and part.steering.keys and len(part) > 1:
            raise SteeringError(
                f"Got key deltas for {len(part)} positions. RoPE rotates keys by their positions, so one "
                "delta fits one position: use scope='last_token', or `steering.scaled(c_k=0)`."
            )
    groups: dict[int, list[Region]] = {}
    for part in parts:
        groups.setdefault(bisect.bisect_right(prompt.breaks, part.start), []).append(part)
    return tuple(Region(group[0].start, group[-1].stop, "steered", parts=tuple(group)) for group in groups.values())


def _parts(prompt: Prompt, steering: Steering | None, scope: Scope | None, end: int) -> list[Region]:
    if steering is not None and scope is None:
        scope = "system" if _heads(prompt) else "pack"
    if steering is not None and scope == "pack" and not prompt.spans:
        raise SteeringError(
            "Got scope='pack' for a prompt without packs. Leave the scope out to steer the system head."
        )
    own = []
    for span in prompt.spans:
        total = _total(span.pack.steering, steering if scope == "pack" else None)
        if total is not None and not total.is_zero and span.start < end:
            own.append(Region(span.start, min(span.stop, end), "steered", steering=total))
    if steering is None or scope == "pack":
        return own
    wanted = Region(*_range(prompt, scope, end), "steered", steering=steering)
    if wanted.start < 0 or wanted.stop <= wanted.start:
        raise SteeringError(f"The prompt of {len(prompt)} tokens has nothing to steer for scope={scope!r}.")
    for part in own:
        if part.start < wanted.stop and wanted.start < part.stop:
            raise SteeringError(
                f"Got scope={scope!r} over the tokens {part.start}:{part.stop} of a pack that is steered itself. Use "
                "scope='pack', which adds up, or the plain pack."
            )
    return sorted((wanted, *own), key=lambda part: part.start)


def _heads(prompt: Prompt) -> bool:
    """Whether all packs stand, plain, in the head of the prompt; steering all of it does more than packs alone."""
    stop = prompt.breaks[0] if prompt.breaks else len(prompt)
    return all(span.stop <= stop and span.pack.steering is None for span in prompt.spans)


def _range(prompt: Prompt, scope: Scope | None, end: int) -> tuple[int, int]:
    if scope == "last_token":
        return end - 1, end
    return 0, min(prompt.breaks[0], end) if scope == "system" and prompt.breaks else end


def _total(own: object, steering: Steering | None) -> Steering | None:
    """What is added to a pack that has a steering of its own."""
    if own is None:
        return steering
    if not isinstance(own, Steering):
        raise SteeringError(f"Got a pack steered by {type(own).__name__}; expected a Steering.")
    return own if steering is None else own + steering
