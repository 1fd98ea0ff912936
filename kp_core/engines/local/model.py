"""The seam between the engine of one machine and the library that runs its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.engines.local.grammar import Constraint
from kp_core.kv import KVTensors
from kp_core.plan import Sampling
from kp_core.rope import Rope

__all__ = ["LocalModel"]


class LocalModel(Protocol):
    """A causal language model on this machine: tokens in, KV and logits out."""

    @property
    def shape(self) -> CacheShape:
        """What it caches."""

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""

    @property
    def max_positions(self) -> int:
        """Most tokens a sequence may have."""

    @property
    def vocabulary(self) -> int:
        """Length of the logits."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """Capabilities that its cache does not allow, each with the reason."""

    @property
    def rope(self) -> Rope:
        """Moves its keys; raises `UnsupportedRequestError` where they cannot be moved."""

    @property
    def batches(self) -> bool:
        """Whether it decodes several sequences in one forward pass; asked for when two wait."""

    def forward(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids`, `(1, new)`, behind what `buffer` holds; the logits behind the last, `(1, vocabulary)`."""

    def forward_all(self, ids: Tensor, buffer: KVBuffer) -> Tensor:
        """As `forward`, with the logits behind every token: `(new, vocabulary)`."""

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """A step of sequences that go on behind these buffers.

        It runs a token behind each, writes its KV to its buffer, and gives the logits, `(rows, vocabulary)`.
        """

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run so many tokens behind each buffer in one pass; the logits behind the last of each, as `rows`."""

    def forward_at(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        past: KVTensors | None,
        past_positions: Sequence[int],
        *,
        layers: int | None = None,
    ) -> KVTensors:
        """See `Forward`."""

    def forward_among(  # noqa: PLR0913
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        buffer: KVBuffer,
        places: Sequence[int],
        *,
        unseen: Sequence[int] = (),
        weights: list[Tensor] | None = None,
        logits: bool = False,
    ) -> Tensor | None:
        """Write KV of `ids`, at `positions`, to the `places` of `buffer`, over all that stands there at its position.

        Nobody sees the tokens at `unseen`. `weights` takes the attention of each layer, `(tokens,)`. With `logits`,
        gives those behind the last of `ids`, `(1, vocabulary)`.
        """

    def forward_soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """See `Forward.soft`."""

    def sampler(
        self, sampling: Sampling, prompt_ids: tuple[int, ...], constraint: Constraint | None
    ) -> Callable[[Tensor, int], int]:
        """How the next token is chosen: from logits, `(vocabulary,)`, and how many may still come, it included."""
