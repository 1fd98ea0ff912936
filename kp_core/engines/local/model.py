"""The interface to what computes: the local engine runs a model of any library through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kp_core.engines.local.buffer import BufferPool, CacheShape, KVBuffer
from kp_core.engines.local.grammar import Constraint
from kp_core.engines.local.tree import PrefixTree
from kp_core.kv import KVTensors
from kp_core.plan.plan import Sampling
from kp_core.rope import Rope


class Model(Protocol):
    """Runs forward passes over KV buffers, one at a time, and writes KV to them."""

    shape: CacheShape
    """The shape of its cache."""
    max_positions: int
    """Most tokens of prompt and answer together."""
    vocabulary: int
    """Length of the logits."""
    end_tokens: frozenset[int]
    """Tokens that end an answer."""
    forks: bool
    """Whether it works in a process that was forked from the one that loaded it."""
    lacks: Mapping[str, str]
    """See `Engine.lacks`; the engine has all other capabilities."""

    @property
    def rope(self) -> Rope:
        """Moves keys; raises `UnsupportedRequestError` if they cannot be moved."""

    def pool(self, tree: PrefixTree, cache_bytes: int) -> BufferPool:
        """The buffers of requests, which may share the budget `cache_bytes` with the prefix tree."""

    def forward(self, ids: Sequence[int], buffer: KVBuffer, logits: int = 1) -> Tensor:
        """Run `ids` behind `buffer`. Returns the logits at the last `logits` of them, `(logits, vocabulary)`."""

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run `tokens` behind each buffer in one pass. Returns the logits at the last of each, `(rows, vocabulary)`.

        Rows may have the same buffer: each is then behind its tokens alone, and those of the last row stay.
        """

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """A function that runs one token behind each buffer in one pass, and returns logits, `(rows, vocabulary)`."""

    def forward_among(  # noqa: PLR0913
        self,
        ids: Sequence[int],
        buffer: KVBuffer,
        places: Sequence[int],
        *,
        unseen: Sequence[int] = (),
        weights: Callable[[Tensor], None] | None = None,
        layers: int | None = None,
        logits: int = 0,
    ) -> Tensor:
        """Compute `ids` at the ascending `places` of `buffer`, which may have tokens behind them; writes their KV.

        Each token attends to all KV up to its place, except at the places `unseen`. `weights` is called with the
        attention weights of each layer, `(heads, len(ids), tokens)`, or of the first `layers`. Returns the logits at
        the last `logits` tokens, `(logits, vocabulary)`.
        """

    def forward_soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """KV of `header`, `ids` and `trailer` behind the tokens `before`, which begin a separate prompt.

        Header and trailer are input embeddings, `(soft tokens, hidden)`.
        """

    def sampler(
        self, sampling: Sampling, prompt_ids: Sequence[int], device: torch.device, constraint: Constraint | None
    ) -> Callable[[Tensor, int], int]:
        """A function that chooses the next token from logits and the number of tokens that may still come."""
