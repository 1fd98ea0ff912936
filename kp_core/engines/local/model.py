"""The interface between the engine for one machine and the library that runs its model."""

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
    """A causal language model on this machine: takes tokens, gives KV and logits."""

    @property
    def shape(self) -> CacheShape:
        """The shape of its cache."""

    @property
    def device(self) -> torch.device:
        """The device that takes token ids."""

    @property
    def max_positions(self) -> int:
        """Most tokens of a sequence."""

    @property
    def vocabulary(self) -> int:
        """Length of the logits."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn."""

    @property
    def lacks(self) -> Mapping[str, str]:
        """Capabilities that this model does not allow, each with the reason."""

    @property
    def rope(self) -> Rope:
        """Moves keys to other positions. Raises `UnsupportedRequestError` if they cannot be moved."""

    @property
    def batches(self) -> bool:
        """Whether it decodes several sequences in one forward pass. First read when two answers wait."""

    def forward(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids`, `(1, new)`, after the tokens in `buffer`, and append their KV.

        Returns the logits after the last one, `(1, vocabulary)`; without `logits`, returns `None`.
        """

    def forward_all(self, ids: Tensor, buffer: KVBuffer) -> Tensor:
        """As `forward`, but returns the logits after every token, `(new, vocabulary)`."""

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """A function that decodes one token for each of these buffers.

        It runs one token after each buffer, appends its KV, and returns the logits, `(rows, vocabulary)`.
        """

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run `tokens[i]` after `buffers[i]`, for all in one pass.

        Returns the logits after the last token of each, `(rows, vocabulary)`.
        """

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
        """Compute `ids` at `positions` and write their KV to `places` of `buffer`.

        Each token attends to all KV in the buffer up to its own position, except to the places `unseen`. `weights`
        takes the attention weights of each layer, `(tokens,)`. With `logits`, returns those after the last of `ids`,
        `(1, vocabulary)`.
        """

    def forward_soft(self, before: Sequence[int], header: Tensor, ids: Sequence[int], trailer: Tensor) -> KVTensors:
        """See `Forward.soft`."""

    def sampler(
        self, sampling: Sampling, prompt_ids: tuple[int, ...], constraint: Constraint | None
    ) -> Callable[[Tensor, int], int]:
        """A function that chooses the next token.

        It takes logits, `(vocabulary,)`, and the number of tokens that may still come, this one included.
        """
