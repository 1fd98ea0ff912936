"""Where a steering acts: in which layers, at which positions, and in what order KV must then come about."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias, get_args

from kp_core.errors import SteeringError
from kp_core.prompt.prompt import Prompt
from kp_core.steering.value import Steering

__all__ = ["AskedSteering", "Block", "LayerRange", "Part", "Scope", "as_steering", "plan_blocks", "resolve_layers"]

LayerRange: TypeAlias = tuple[float, float] | range | Sequence[int]
"""Layers as fractions of the depth `(1/3, 2/3)`, as a `range`, or as indices `[10, 11, 12]`."""

Scope: TypeAlias = Literal["pack", "system", "prompt", "last_token"]
"""What is steered: the packs; the head of the prompt (all before the first message that is not the system's); the whole
prompt; or the last token of it that the first token of the answer can see in the cache."""

AskedSteering: TypeAlias = Steering | tuple[Steering, float | None]
"""A steering as it is, or with its alpha; with `None`, at the default strength (`Steering.default_alpha`)."""


@dataclass(frozen=True)
class Part:
    """The tokens `start:stop` of a prompt, with the deltas that are added to their KV."""

    start: int
    stop: int
    steering: Steering


@dataclass(frozen=True)
class Block:
    """The tokens `start:stop` that are computed as if nothing in them were steered, and then altered at `parts`.

    What is behind the block sees the altered KV. `label` is one negative number, no token id, that names what is done
    to the block.
    """

    start: int
    stop: int
    parts: tuple[Part, ...]

    @property
    def label(self) -> int:
        """Digest of the parts as a negative number, which beside token ids keeps altered KV apart in a prefix tree."""
        names = [f"{part.start - self.start}:{part.stop - self.start}:{part.steering.id}" for part in self.parts]
        return -1 - int.from_bytes(blake2b("\0".join(names).encode(), digest_size=16).digest(), "little")


def resolve_layers(layers: LayerRange | None, count: int) -> tuple[int, ...]:
    """The layers of a model of `count` that a range names: by default the middle third (arXiv 2604.03270, section 4.5).

    A pair of floats is read as fractions of the depth; everything else as indices. Raises `SteeringError` for what
    names no layer of the model.
    """
    advice = f"expected two fractions like (1/3, 2/3), or indices from 0 to {count - 1} like range(10, 20)."
    if not isinstance(layers, Sequence | None):
        raise SteeringError(f"Got the layers {layers!r}; {advice}")
    chosen: Sequence[float] = (1 / 3, 2 / 3) if layers is None else tuple(layers)
    if len(chosen) == 2 and any(isinstance(bound, float) for bound in chosen):
        start, stop = chosen
        if not 0 <= start < stop <= 1:
            raise SteeringError(f"Got the layers {layers!r}; {advice}")
        first = min(round(start * count), count - 1)
        return tuple(range(first, max(round(stop * count), first + 1)))
    indices = {index for index in chosen if type(index) is int and 0 <= index < count}
    if not chosen or len(indices) != len(chosen):
        raise SteeringError(f"Got the layers {layers!r} of a model of {count} layers; {advice}")
    return tuple(sorted(indices))


def as_steering(steering: AskedSteering | None, *, with_knowledge: bool = False) -> Steering | None:
    """The steering a request asks for, scaled; `None` for none and for one that changes nothing.

    An alpha of `None` is the default one, with or without knowledge. Raises `SteeringError` for what is no steering.
    """
    if isinstance(steering, tuple):
        if len(steering) != 2 or not isinstance(steering[0], Steering):
            raise SteeringError(f"Got the steering {steering!r}; expected a Steering, or (Steering, alpha).")
        steering = steering[0].at_alpha(steering[1], with_knowledge=with_knowledge)
    if steering is not None and not isinstance(steering, Steering):
        raise SteeringError(
            f"Got a steering of type {type(steering).__name__}; expected a Steering, or (Steering, alpha). Make one "
            "with `engine.make_steering(preset('formal'))`."
        )
    return None if steering is None or steering.is_zero else steering


def plan_blocks(
    prompt: Prompt,
    steering: Steering | None,
    scope: Scope | None,
    *,
    answering: bool = True,
) -> tuple[Block, ...]:
    """The blocks to steer in `prompt`, in order: those of its steered packs, and what `steering` and `scope` ask for.

    Without `scope` the system head is steered, packs in it included; the packs alone where some stand elsewhere or are
    steered themselves. Parts of one message form one block: all are computed, then all are altered. When `answering`,
    the last token of the prompt belongs to no block: it is computed behind the altered KV, which is how the first token
    of the answer comes to see it.

    Raises `SteeringError` when the scope is not in the prompt, when two steerings would meet at one position, and for
    key deltas on more than one position.
    """
    if scope not in (None, *get_args(Scope)):
        raise SteeringError(f"Got the scope {scope!r}; expected one of {', '.join(get_args(Scope))}, or None.")
    parts = _parts(prompt, steering, scope, len(prompt) - 1 if answering else len(prompt))
    for part in parts:
        if part.steering.keys and part.stop - part.start > 1:
            raise SteeringError(
                f"Got key deltas for {part.stop - part.start} positions. RoPE rotates keys by their positions, so one "
                "delta fits one position: use scope='last_token', or `steering.scaled(c_k=0)`."
            )
    if not parts:
        return ()
    groups: dict[int, list[Part]] = {}
    for part in parts:
        groups.setdefault(bisect.bisect_right(prompt.breaks, part.start), []).append(part)
    return tuple(Block(group[0].start, group[-1].stop, tuple(group)) for group in groups.values())


def _parts(prompt: Prompt, steering: Steering | None, scope: Scope | None, end: int) -> list[Part]:
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
            own.append(Part(span.start, min(span.stop, end), total))
    if steering is None or scope == "pack":
        return own
    wanted = Part(*_range(prompt, scope, end), steering)
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
