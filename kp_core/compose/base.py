"""The seam for composing packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span
from kp_core.rope import Rope

__all__ = ["Composer", "Forward", "Stretch", "WrappingComposer"]


@dataclass(frozen=True)
class Stretch:
    """The tokens `start:stop` of a prompt that a composer makes KV for: packs, and the few tokens between them.

    `token_ids` are those of the stretch, `behind` those of the prompt from `stop` on, which end with the question.
    """

    start: int
    stop: int
    spans: tuple[Span, ...]
    token_ids: tuple[int, ...]
    behind: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def between(self) -> tuple[int, ...]:
        """The positions, counted from `start`, of the tokens that no pack delivers."""
        inside = {at for span in self.spans for at in range(span.start, span.stop)}
        return tuple(at - self.start for at in range(self.start, self.stop) if at not in inside)


class Forward(Protocol):
    """What a composer computes with: the model, and what stands before the stretch.

    Attention masks by position: a token at position `p` sees what stands at positions up to `p`, in whatever order the
    keys come. So queries need not be the tail of the keys.
    """

    @property
    def before(self) -> KVTensors | None:
        """KV of all tokens before the stretch, not to be changed; `None` at the beginning of the prompt."""

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
        """Where the KV of the stretch will stand, right behind `before`, to be written in place; it holds anything."""

    def anew(self, kv: KVTensors, places: Sequence[int], ids: Sequence[int]) -> KVTensors:
        """`kv`, the stretch, with `ids` at `places` of it computed anew, over all that stands before each, in one pass.

        What `room` gave is written in place; anything else is copied there first. It is the last thing that `fill`
        does, which gives back what this gave: that pass may be the one of what stands behind the stretch.
        """

    def attention(self, ids: Sequence[int], positions: Sequence[int], kv: KVTensors, blank: Sequence[int]) -> Tensor:
        """How much `ids` look at each token of `kv`, the stretch, but those at the places `blank`, which nobody sees.

        Weights summed over queries, heads and layers, `(tokens,)`. Raises `UnsupportedRequestError` where the model's
        attention does not tell.
        """

    def soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """KV of `header`, `ids` and `trailer` behind the tokens `before`, at the beginning of a prompt of their own.

        Header and trailer are input embeddings, `(soft tokens, hidden)`.
        """


@runtime_checkable
class Composer(Protocol):
    """Makes the KV of packs that do not stand where they were compiled.

    Packs behind the very prefix they were compiled for are exact and shared by all composers; a composer is asked about
    the others. What it makes may depend on what stands before a stretch and in it; where it depends on what stands
    behind as well, its class says `keeps = False`, and the prefix tree does not keep it.
    """

    @property
    def exact(self) -> bool:
        """Whether the KV is what the model computes for the text at its position."""

    @property
    def key(self) -> str:
        """Method and parameters: what two composers of one key make is the same, and kept under one name."""

    def regions(self, prompt: Prompt) -> Sequence[Span]:
        """The spans of `prompt` whose KV it makes; the other ones are computed."""

    def fill(self, region: Stretch, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """KV for the tokens of `region`: per layer `(kv_heads, tokens, head_dim)`.

        `packs` are those of the region's spans, with their KV, and are not to be changed; what comes back is written to
        the cache as it is. `forward` computes with the model; `kp_core.compose.stretch` has what most methods need.
        """


@runtime_checkable
class WrappingComposer(Composer, Protocol):
    """A composer that puts tokens of its own around packs, which take positions of the prompt.

    It brings the KV of wrapped packs itself: `compile` is called once for each, and `fill` with what that made.
    """

    def check(self, fingerprint: ModelFingerprint) -> None:
        """Raise `WrapperMismatchError` for a model that it cannot wrap packs for."""

    def wrap(self, pack: KnowledgePack, token_ids: Sequence[int]) -> KnowledgePack:
        """The pack whose text has `token_ids`, with room for the composer's own tokens among them, and no KV."""

    def compile(self, pack: KnowledgePack, forward: Forward) -> KVTensors:
        """KV of a wrapped pack behind its own prefix: per layer `(kv_heads, tokens, head_dim)`."""
