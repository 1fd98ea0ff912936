"""The regions of a prompt, the protocol of the composers that fill them, and the default, exact composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from kp_core.errors import PackError, SteeringError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import Steering

__all__ = ["Composer", "ExactComposer", "Move", "Region", "placed"]

Move: TypeAlias = Callable[[KVTensors, int, KVTensors], object]
"""Writes KV, moved by so many positions, to its place (`Rope.move`). Raises `UnsupportedRequestError` if the model's
keys cannot be moved."""


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
        """Whether a pack has no KV for it, in memory or in the store, so that the model computes it."""
        pack = self.span.pack if self.span and self.source in ("pack", "composed") else None
        return pack is None or (pack.kv is None and not pack.stored_bytes)

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

        Sums are computed in float32 or wider and rounded once. Raises `SteeringError` when a delta does not fit.
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
            raise SteeringError(
                f"The {name} delta of layer {layer} has shape {tuple(delta.shape)}; this model's cache takes {shape} "
                f"there and has {len(tensors)} layers. Make the steering with `engine.make_steering(pairs)`."
            )
        plain_values = tensors[layer][:, span]
        wide_dtype = torch.promote_types(plain_values.dtype, torch.float32)
        shifted = plain_values.to(wide_dtype) + delta.to(plain_values.device, wide_dtype)[:, None]
        tensors[layer][:, span] = shifted.to(plain_values.dtype)


@runtime_checkable
class Composer(Protocol):
    """Makes the KV of packs that do not stand behind the prefix they were compiled for.

    Packs behind their prefix are exact, and their KV is used without a composer. The composed KV depends
    only on the tokens before and inside the region.
    """

    @property
    def exact(self) -> bool:
        """Whether the KV is what the model computes for the text at its position."""

    @property
    def key(self) -> str:
        """Method and parameters. Composers with equal keys make equal KV, which the prefix tree shares."""

    def regions(self, prompt: Prompt) -> Sequence[Span]:
        """The spans of `prompt` whose KV it makes; the others are prefilled."""

    def fill(self, region: Region, packs: Sequence[KnowledgePack], room: KVTensors, move: Move) -> Sequence[int]:
        """Write the KV of `packs`, those of the region's spans, into `room`, the place of the region in the cache.

        Returns the tokens of packs, counted from the start of the region, that the model must compute anew. It always
        computes those between packs. Each computed token sees all tokens before it. `packs` have KV and are read-only.
        """


def placed(
    region: Region, packs: Sequence[KnowledgePack], room: KVTensors
) -> Iterator[tuple[KVTensors, int, KVTensors]]:
    """Yield the KV of each pack, by how many positions it moves, and its place in `room`.

    Raises `PackError` for a pack without KV.
    """
    for span, pack in zip(region.spans, packs, strict=True):
        if pack.kv is None:
            raise PackError(f"Got a lazy pack for the tokens {span.start}:{span.stop}; expected its KV.")
        place = room.slice(span.start - region.start, span.stop - region.start)
        yield pack.kv, span.start - len(pack.prefix), place


@dataclass(frozen=True)
class ExactComposer:
    """Sequential composition (Knowledge Packs, arXiv 2604.03270): the answer equals that for the text, token for token.

    A pack's KV is used only behind the prefix it was compiled for. Elsewhere its tokens are prefilled, and the prefix
    tree keeps the result.
    """

    exact = True
    key = "exact"

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:  # noqa: ARG002 - all other packs are prefilled
        """No spans."""
        return ()

    def fill(self, region: Region, packs: Sequence[KnowledgePack], room: KVTensors, move: Move) -> Sequence[int]:  # noqa: ARG002
        """Always raises `PackError`, as there are no regions to fill."""
        raise PackError(f"Got the region {region.start}:{region.stop} to compose; exact composition makes none.")
