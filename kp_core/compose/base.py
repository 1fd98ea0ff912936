"""The seam for composing packs."""

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
from kp_core.steering.value import Steering

__all__ = ["Composer", "Forward", "Region", "Source", "join"]


Source: TypeAlias = Literal["pack", "composed", "steered", "computed"]
"""Where the KV of a region comes from when the prefix tree lacks it."""


@dataclass(frozen=True)
class Region:
    """The tokens `start:stop` of a prompt, whose KV has one source.

    A pack stands in a region alone; a composed one has packs and the few tokens between them, whose ids are
    `token_ids`. A steered one is computed as if nothing in it were steered, and then each of its `parts` is altered by
    its `steering`; what is behind it sees the altered KV.
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
        """Its first pack."""
        return self.spans[0] if self.spans else None

    @property
    def between(self) -> tuple[int, ...]:
        """The positions, counted from `start`, of the tokens that no pack delivers."""
        inside = {at for span in self.spans for at in range(span.start, span.stop)}
        return tuple(at - self.start for at in range(self.start, self.stop) if at not in inside)

    @cached_property
    def label(self) -> int:
        """A negative number, no token id, for KV that is not what the model computes for the text, else 0.

        It names what was done: neither the region nor anything behind it is found in the prefix tree without it.
        """
        if self.composer is not None:
            # Their own prefixes and numerics matter to what a composer makes of packs.
            packs = [
                (span.start - self.start, span.pack.fingerprint.id, span.pack.prefix, span.pack.token_ids)
                for span in self.spans
            ]
            about = f"{self.composer.key}\0{packs}"
        elif self.parts:
            about = "\0".join(
                f"{part.start - self.start}:{part.stop - self.start}:{part.steering.id if part.steering else ''}"
                for part in self.parts
            )
        else:
            return 0
        return -1 - int.from_bytes(blake2b(about.encode(), digest_size=16).digest(), "little")


class Forward(Protocol):
    """What a composer computes with: the model, and what stands before the region.

    Attention masks by position: a token at position `p` sees what stands at positions up to `p`, in whatever order the
    keys come. So queries need not be the tail of the keys.
    """

    @property
    def before(self) -> KVTensors | None:
        """KV of all tokens before the region, not to be changed; `None` at the beginning of the prompt."""

    @property
    def rope(self) -> Rope:
        """Moves keys; raises `UnsupportedRequestError` where the model's RoPE forbids it."""

    def __call__(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | None = None,
        past: KVTensors | None = None,
        past_positions: Sequence[int] | None = None,
        layers: int | None = None,
    ) -> KVTensors:
        """KV of `ids` behind `past`: per layer `(kv_heads, len(ids), head_dim)`, of the first `layers` layers.

        By default `past` stands at the positions from 0 on, and `ids` behind it.
        """

    def room(self, tokens: int) -> KVTensors:
        """Where the KV of the region will stand, right behind `before`, to be written in place; it holds anything."""

    def anew(self, kv: KVTensors, places: Sequence[int]) -> KVTensors:
        """`kv` of the region with the tokens at `places`, counted from its start, computed anew in one pass.

        Each sees all that stands before it. What `room` gave is written in place; anything else is copied there first.
        It is the last thing that `fill` does, which gives back what this gave: that pass may be the one of what stands
        behind the region.
        """

    def attention(self, tokens: int, kv: KVTensors, blank: Sequence[int]) -> Tensor:
        """How much the last `tokens` of the prompt look at each token of `kv`, the region; those at `blank` are hidden.

        Weights summed over queries, heads and layers, `(tokens,)`. The prefix tree does not keep what is composed with
        it, as that depends on the question. Raises `UnsupportedRequestError` where the model's attention does not tell.
        """

    def soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """KV of `header`, `ids` and `trailer` behind the tokens `before`, at the beginning of a prompt of their own.

        Header and trailer are input embeddings, `(soft tokens, hidden)`.
        """


@runtime_checkable
class Composer(Protocol):
    """Makes the KV of packs that do not stand where they were compiled.

    Packs behind the very prefix they were compiled for are exact and shared by all composers; a composer is asked about
    the others. What it makes depends on what stands before a region and in it, and on what `Forward` says of the rest.
    """

    @property
    def exact(self) -> bool:
        """Whether the KV is what the model computes for the text at its position."""

    @property
    def key(self) -> str:
        """Method and parameters: what two composers of one key make is the same, and kept under one name."""

    def regions(self, prompt: Prompt) -> Sequence[Span]:
        """The spans of `prompt` whose KV it makes; the other ones are computed."""

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """KV for the tokens of `region`: per layer `(kv_heads, tokens, head_dim)`.

        `packs` are those of the region's spans, with their KV, and are not to be changed; what comes back is written to
        the cache as it is. `forward` computes with the model.
        """


def join(region: Region, parts: Sequence[KVTensors], forward: Forward) -> KVTensors:
    """The KV of `region`: `parts` for its packs, as they are; what stands between packs is computed in one pass."""
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
