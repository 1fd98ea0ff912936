"""The protocol of composers, with the regions that they fill and the model access that they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kp_core.errors import KVShapeError
from kp_core.kv import KVTensors
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span
from kp_core.rope import Rope
from kp_core.steering import Steering

__all__ = ["Composer", "Forward", "Region", "Source", "join"]


Source: TypeAlias = Literal["pack", "composed", "steered", "computed"]
"""Where the KV of a region comes from if it is not in the prefix tree."""


@dataclass(frozen=True)
class Region:
    """The tokens `start:stop` of a prompt, whose KV has one source.

    A `pack` region is one pack. A `composed` region has packs and the few tokens between them; `token_ids` are the ids
    of all its tokens. A `steered` region is computed without steering, then the `steering` of each of its `parts` is
    added. Later tokens see the steered KV.
    """

    start: int
    stop: int
    source: Source
    spans: tuple[Span, ...] = ()
    composer: Composer | None = None
    token_ids: tuple[int, ...] = ()
    parts: tuple[Region, ...] = ()
    steering: Steering | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span | None:
        """The first pack, or `None`."""
        return self.spans[0] if self.spans else None

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


class Forward(Protocol):
    """A composer's access to the model and to the KV before the region.

    Attention masks by position: a token at position `p` sees the keys at positions up to `p`, in whatever order they
    are stored. So queries need not be the last of the keys.
    """

    @property
    def before(self) -> KVTensors | None:
        """KV of all tokens before the region, read-only; `None` at the beginning of the prompt."""

    @property
    def rope(self) -> Rope:
        """Moves keys; raises `UnsupportedRequestError` if the model's RoPE does not allow it."""

    def __call__(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | None = None,
        past: KVTensors | None = None,
        past_positions: Sequence[int] | None = None,
    ) -> KVTensors:
        """KV of `ids` behind `past`, per layer `(kv_heads, len(ids), head_dim)`.

        By default, `past` has the positions from 0 on, and `ids` the positions behind it.
        """

    def room(self, tokens: int) -> KVTensors:
        """Uninitialised KV for the region, directly behind `before` in the buffer, to be written in place."""

    def anew(self, kv: KVTensors, places: Sequence[int]) -> KVTensors:
        """The region's `kv` with the tokens at `places`, counted from its start, recomputed in one forward pass.

        Each recomputed token sees all tokens before it. KV from `room` is written in place; other KV is copied there
        first. `fill` must call this last and return its result, because the engine may run the pass later, together
        with the tokens behind the region.
        """

    def soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """KV of `header`, `ids` and `trailer`, in a separate prompt that begins with the tokens `before`.

        Header and trailer are input embeddings, `(soft tokens, hidden)`.
        """


@runtime_checkable
class Composer(Protocol):
    """Makes the KV of packs that do not stand behind the prefix they were compiled for.

    Packs behind their prefix are exact, and their KV is used without a composer. The composed KV depends on the
    tokens before and in the region alone.
    """

    @property
    def exact(self) -> bool:
        """Whether the KV is what the model computes for the text at its position."""

    @property
    def key(self) -> str:
        """Method and parameters. Composers with equal keys make equal KV, which the prefix tree shares."""

    def regions(self, prompt: Prompt) -> Sequence[Span]:
        """The spans of `prompt` whose KV it makes; the others are prefilled."""

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """KV for the tokens of `region`: per layer `(kv_heads, tokens, head_dim)`.

        `packs` are those of the region's spans, with KV, read-only. The result is written to the cache unchanged.
        """


def join(region: Region, parts: Sequence[KVTensors], forward: Forward) -> KVTensors:
    """The KV of `region`: `parts` for its packs, unchanged, and the tokens between packs computed in one pass.

    Raises `KVShapeError` for parts of other lengths than the packs.
    """
    if [part.tokens for part in parts] != list(map(len, region.spans)):
        raise KVShapeError(
            f"Got KV of {[part.tokens for part in parts]} tokens for packs of {list(map(len, region.spans))}."
        )
    if len(parts) == 1 and len(region) == parts[0].tokens:
        return parts[0]
    room = forward.room(len(region))
    for span, part in zip(region.spans, parts, strict=True):
        place = room.slice(span.start - region.start, span.stop - region.start)
        for tensor, target in zip((*part.keys, *part.values), (*place.keys, *place.values), strict=True):
            target.copy_(tensor)
    return forward.anew(room, region.between)
