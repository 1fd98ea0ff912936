"""The plan of a request: a prompt, the source of KV for each of its regions, and how the answer is made."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from kp_core.errors import GenerationTimeoutError, OptionError
from kp_core.kv import KVTensors
from kp_core.packs.entry import Entry
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.view import PackView
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import Scope, Steering

if TYPE_CHECKING:
    from kp_core.plan.composer import Composer

_GAP_TOKENS = 64  # Maximum text between two packs of one composed region; longer text is a region of its own.

COMPUTED = ("computed", "steered")
"""Sources of KV that a forward pass makes."""
_MOST_TOP = 20  # As OpenAI and vLLM.


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults are greedy. `kp_core.plan.request.ABOUT` explains each field.

    Raises `OptionError` for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        # Convert integers, because the sampling library expects floats.
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
            "logprobs": (isinstance(self.logprobs, bool), "True or False; `top_logprobs` is a number"),
            "top_logprobs": (_is_whole(self.top_logprobs, 0, _MOST_TOP), f"an integer from 0 to {_MOST_TOP}"),
            "stop": (all(text and isinstance(text, str) for text in self.stop), "strings that are not empty"),
        }
        for name, (is_valid, expected) in checks.items():
            if not is_valid:
                raise OptionError(f"Got {name}={getattr(self, name)!r}; expected {expected}.")

    @property
    def gives_logprobs(self) -> bool:
        """Whether log-probabilities are returned: with `logprobs`, or `top_logprobs` alone."""
        return self.logprobs or self.top_logprobs > 0


def number(value: object, name: str) -> float:
    """Convert the `value` of an option to float; raises `OptionError` if it is no number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    raise OptionError(f"Got {name}={str(value)[:40]!r} ({type(value).__name__}); expected a number.")


def _is_whole(value: object, least: int, most: int | None = None) -> bool:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) and (most is None or int(value) <= most)


@dataclass(frozen=True)
class Limit:
    """When a generation must end: if it is cancelled, or its time is up."""

    cancel: threading.Event | None = None
    timeout: float | None = None
    """Seconds."""
    began: float = field(default_factory=time.perf_counter)
    """On the clock of `time.perf_counter`."""

    def is_set(self) -> bool:
        """Whether it must end; named as the method of an event."""
        return self.is_over or (self.cancel is not None and self.cancel.is_set())

    @property
    def may_end(self) -> bool:
        """Whether there is a timeout or a cancel event."""
        return self.cancel is not None or self.timeout is not None

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.timeout is not None and self.spent > self.timeout

    def check(self, tokens: int) -> None:
        """Raise `GenerationTimeoutError` when the time is up; `tokens` is how many were generated."""
        if self.is_over:
            raise GenerationTimeoutError(
                f"The answer was not complete after {self.timeout} s ({tokens} tokens were generated). Raise the "
                "timeout, lower max_tokens, or send less to prefill."
            )

    @property
    def spent(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self.began


@dataclass(frozen=True)
class Region:
    """The tokens `start:stop` of a prompt, whose KV has one source.

    A `pack` region is one pack. A `composed` region has packs and the few tokens between them. A `steered` region is
    computed without steering, then the `steering` of each of its `parts` is added. Later tokens see the steered KV.
    """

    start: int
    stop: int
    source: Literal["pack", "composed", "steered", "computed"]
    """Where its KV comes from if it is not in the prefix tree."""
    spans: tuple[Span, ...] = ()
    composer: Composer | None = None
    parts: tuple[Region, ...] = ()
    steering: Steering | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span | None:
        """The first pack, or `None`."""
        return self.spans[0] if self.spans else None

    @property
    def lacks_kv(self) -> bool:
        """Whether a pack has no KV for it, in memory or in the store, so that the model computes it.

        A pack between soft tokens is compiled at use.
        """
        pack = self.span.pack if self.span and self.source in ("pack", "composed") else None
        is_soft = self.span is not None and self.span.soft is not None
        return not is_soft and (pack is None or (pack.kv is None and not pack.stored_bytes))

    @property
    def between(self) -> tuple[int, ...]:
        """Positions, counted from `start`, of the tokens outside of packs."""
        in_packs = {at for span in self.spans for at in range(span.start, span.stop)}
        return tuple(at - self.start for at in range(self.start, self.stop) if at not in in_packs)

    @cached_property
    def label(self) -> int:
        """0 if the KV is what the model computes for the text, else a negative hash of composer and packs, or steering.

        In the prefix tree, the region and everything behind it is found only under this label. No token id is negative.
        """
        if self.composer is not None:
            # Composed KV depends on the prefix and the numerics of each pack.
            packs = [
                (span.start - self.start, span.pack.fingerprint.id, span.pack.prefix, span.pack.token_ids)
                for span in self.spans
            ]
            description = f"{self.composer.key}\0{packs}"
        elif self.parts:
            description = "\0".join(
                f"{part.start - self.start}:{part.stop - self.start}:{part.steering.id if part.steering else ''}"
                for part in self.parts
            )
        else:
            return 0
        return -1 - int.from_bytes(blake2b(description.encode(), digest_size=16).digest(), "little")

    @torch.inference_mode()
    def steered(self, kv: KVTensors) -> KVTensors:
        """Return a copy of the plain `kv` of a steered region with the deltas of its parts added.

        Sums are computed in float32 or wider and rounded once. Raises `OptionError` when a delta does not fit.
        """
        steered_kv = kv.clone()
        for part in self.parts:
            span = slice(part.start - self.start, part.stop - self.start)
            if part.steering is not None:
                _add("value", steered_kv.values, part.steering.values, span)
                _add("key", steered_kv.keys, part.steering.keys, span)
        return steered_kv


def _add(name: str, tensors: Sequence[Tensor], deltas: Mapping[int, Tensor], span: slice) -> None:
    for layer, delta in deltas.items():
        if layer >= len(tensors) or delta.shape != tensors[layer][:, 0].shape:
            shape = tuple(tensors[layer][:, 0].shape) if layer < len(tensors) else None
            raise OptionError(
                f"The {name} delta of layer {layer} has shape {tuple(delta.shape)}; this model's cache takes {shape} "
                f"there and has {len(tensors)} layers. Make the steering with `engine.make_steering(pairs)`."
            )
        plain_values = tensors[layer][:, span]
        wide_dtype = torch.promote_types(plain_values.dtype, torch.float32)
        shifted = plain_values.to(wide_dtype) + delta.to(plain_values.device, wide_dtype)[:, None]
        tensors[layer][:, span] = shifted.to(plain_values.dtype)


@dataclass(frozen=True)
class Plan:
    """What an engine needs to answer one request; made once, and printable (`Session.explain`).

    It does not say when the answer must end early: that is `TokenStream.limit`.
    """

    prompt: Prompt
    regions: tuple[Region, ...]
    sampling: Sampling = field(default_factory=Sampling)
    token_budget: int = 0
    """Maximum tokens of the answer; with 0, the prompt is only prefilled."""
    grammar: str | None = None
    """The Lark grammar of the answer; with `opened`, the prompt has already begun a `<think>` block."""
    opened: bool = False
    packs: PackView | None = None
    """What may be read of a store. The prompt may also use KV of these namespaces from the prefix tree."""
    entries: Mapping[tuple[int, int], Entry] = field(default_factory=dict, compare=False)
    """The stored entries that fit along the prompt, each by its tokens `start:stop` there."""
    keep: Mapping[tuple[int, int], Entry] = field(default_factory=dict, compare=False)
    """Entries to store: the engine gives their KV to `TokenStream.kept`."""
    unsteered: Plan | None = None
    """For a steered prompt: the plain plan up to the end of its first steered region, which follows plain KV."""
    wanted: tuple[int, int] = (0, 0)
    """The token range whose KV `Engine.kv` returns; what no region provides is computed."""
    reuse: bool = True
    model: ModelFingerprint | None = None
    """The model it was made for, whose KV it may read; an engine refuses it for another. `None` fits any."""
    choice: str = field(default="", compare=False)
    """The composer that was chosen, and why, if the request left that open."""

    def until(self, stop: int) -> Plan:
        """Return the plan that only prefills the first `stop` tokens of the prompt."""
        regions = tuple(replace(region, stop=min(region.stop, stop)) for region in self.regions if region.start < stop)
        prompt = self.prompt.until(stop)
        return replace(self, prompt=prompt, regions=regions, token_budget=0, grammar=None)

    @property
    def owners(self) -> frozenset[str]:
        """The namespaces whose KV this prompt may use from the prefix tree."""
        packs = (*self.prompt.spans, *self.prompt.as_text)
        readable = () if self.packs is None else self.packs.namespaces
        return frozenset({self.prompt.owner, *readable, *(span.pack.namespace for span in packs)})

    @property
    def ends(self) -> frozenset[int]:
        """Positions at which states of recurrent layers are kept, if any: the ends of packs, messages and regions."""
        packs = (span.stop for span in self.prompt.spans)
        return frozenset({*self.prompt.breaks, *packs, *(region.stop for region in self.regions)})

    def sources(self, found: int) -> Iterator[tuple[int, int, str, Region]]:
        """Yield the parts of the prompt as start, stop, source of their KV and region.

        The prefix tree has the first `found` tokens (`tree`); stored entries are `kept`.
        """
        for region in self.regions:
            at = min(max(found, region.start), region.stop)
            source = "computed" if region.spans and region.lacks_kv else region.source
            parts = [(region.start, at, "tree")]
            for start, stop in self.entries if source == "computed" else ():
                if at <= start and stop <= region.stop:
                    parts += [(at, start, source), (start, stop, "kept")]
                    at = stop
            yield from ((*part, region) for part in [*parts, (at, region.stop, source)] if part[0] < part[1])

    @property
    def labels(self) -> Mapping[int, tuple[int, int]]:
        """End and label of each region with a label, by its start."""
        return {region.start: (region.stop, region.label) for region in self.regions if region.label}


def plan_regions(
    prompt: Prompt, sources: Mapping[Span, Composer | None] = {}, steered: Sequence[Region] = ()
) -> tuple[Region, ...]:
    """Divide a prompt into regions, in order. A pack in `sources` is filled by its composer, or uses its own KV.

    With `steered` regions, all packs are computed; the KV before the first comes from a plain plan (`Plan.unsteered`).
    """
    planned = steered or [
        Region(span.start, span.stop, "composed" if sources[span] else "pack", (span,), sources[span])
        for span in prompt.spans
        if span in sources
    ]
    regions: list[Region] = []
    end = 0
    for region in [*planned, Region(len(prompt), len(prompt), "computed")]:
        if end < region.start:
            regions.append(Region(end, region.start, "computed"))
        if len(region):
            regions.append(region)
        end = region.stop
    return _composed(regions)


def _composed(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Join neighbouring regions of one composer, with the few tokens between, because it fills them together."""
    joined: list[Region] = []
    for region in regions:
        current = region
        if region.composer is not None:
            gap = joined[-1] if joined and joined[-1].source == "computed" and len(joined[-1]) <= _GAP_TOKENS else None
            before = joined[-1 if gap is None else -2] if len(joined) > (gap is not None) else None
            if before is not None and before.composer == region.composer:
                current = replace(before, stop=region.stop, spans=(*before.spans, *region.spans))
                del joined[-1 if gap is None else -2 :]
            elif gap is not None and before is not None and before.source == "pack":
                current = replace(region, start=joined.pop().start)  # Text between a pack and this region joins it.
        joined.append(current)
    return tuple(joined)


def plan_steered(prompt: Prompt, steering: Steering | None, scope: Scope | None) -> tuple[Region, ...]:
    """Return the steered regions of `prompt`, in order, for its steered packs and for `steering` and `scope`.

    Without `scope`, the system head is steered, with its packs; but only the packs if some stand elsewhere or have a
    steering of their own. Parts of one message form one region. The last token of the prompt is in no region, so the
    first token of the answer sees the steering.

    Raises `OptionError` if the prompt lacks the scope, if two steerings would overlap, and for key deltas on more
    than one position.
    """
    if scope not in (None, *get_args(Scope)):
        raise OptionError(f"Got the scope {scope!r}; expected one of {', '.join(get_args(Scope))}, or None.")
    if steering is not None and scope is None:
        head = next(iter(prompt.breaks), len(prompt))
        is_head = all(span.stop <= head and span.pack.steering is None for span in prompt.spans)
        scope = "system" if is_head else "pack"
    parts = _parts(prompt, steering, scope)
    for region in parts:
        if region.steering and region.steering.keys and len(region) > 1:
            raise OptionError(
                f"Got key deltas for {len(region)} positions. RoPE rotates keys by their positions, so one "
                "delta fits one position: use scope='last_token', or `steering.scaled(c_k=0)`."
            )
    groups: dict[int, list[Region]] = {}
    for region in parts:
        groups.setdefault(bisect.bisect_right(prompt.breaks, region.start), []).append(region)
    return tuple(Region(group[0].start, group[-1].stop, "steered", parts=tuple(group)) for group in groups.values())


def _parts(prompt: Prompt, steering: Steering | None, scope: Scope | None) -> list[Region]:
    end, head = len(prompt) - 1, next(iter(prompt.breaks), len(prompt))
    if steering is not None and scope == "pack" and not prompt.spans:
        raise OptionError("Got scope='pack' for a prompt without packs. Leave the scope out to steer the system head.")
    steered = []
    for span in prompt.spans:
        total = steering if scope == "pack" else None
        if (own := span.pack.steering) is not None:
            if not isinstance(own, Steering):
                raise OptionError(f"Got a pack steered by {type(own).__name__}; expected a Steering.")
            total = own if total is None else own + total
        if total is not None and not total.is_zero and span.start < end:
            steered.append(Region(span.start, min(span.stop, end), "steered", steering=total))
    if steering is None or scope == "pack":
        return steered
    start, stop = (end - 1 if scope == "last_token" else 0), (min(head, end) if scope == "system" else end)
    if start < 0 or stop <= start:
        raise OptionError(f"The prompt of {len(prompt)} tokens has nothing to steer for scope={scope!r}.")
    if part := next((part for part in steered if part.start < stop and start < part.stop), None):
        raise OptionError(
            f"Got scope={scope!r} over the tokens {part.start}:{part.stop} of a pack that is steered itself. Use "
            "scope='pack', which adds up, or the plain pack."
        )
    return sorted((Region(start, stop, "steered", steering=steering), *steered), key=lambda part: part.start)
