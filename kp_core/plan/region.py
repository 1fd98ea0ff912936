"""The regions of a prompt: stretches of tokens whose KV has one source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kp_core.errors import OptionError
from kp_core.kv import KVTensors
from kp_core.prompt.prompt import Span
from kp_core.steering import Steering

if TYPE_CHECKING:
    from kp_core.plan.composer import Composer


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
