"""What the engine of one machine needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kp_core.engines.local.buffer import CacheShape, KVBuffer
from kp_core.engines.local.computing import PlacedModel
from kp_core.engines.local.grammar import Constraint
from kp_core.engines.local.scheduler import BatchingModel
from kp_core.plan import Sampling

__all__ = ["LocalModel", "Sampler"]


class LocalModel(PlacedModel, BatchingModel, Protocol):
    """A causal language model on this machine: tokens in, KV and logits out."""

    @property
    def shape(self) -> CacheShape:
        """What it caches."""

    @property
    def max_positions(self) -> int:
        """Most tokens a sequence may have."""

    @property
    def vocabulary(self) -> int:
        """Length of the logits."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn."""

    def forward(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids`, `(1, new)`, behind what `buffer` holds; the logits behind the last, `(1, vocabulary)`."""

    def forward_all(self, ids: Tensor, buffer: KVBuffer) -> Tensor:
        """As `forward`, with the logits behind every token: `(new, vocabulary)`."""

    def sampler(self, sampling: Sampling, prompt_ids: tuple[int, ...], constraint: Constraint | None) -> Sampler:
        """How the next token is chosen."""


class Sampler(Protocol):
    """Chooses tokens."""

    def __call__(self, logits: Tensor, left: int) -> int:
        """The next token, from logits of shape `(vocabulary,)`; `left` may still come, this one included."""
