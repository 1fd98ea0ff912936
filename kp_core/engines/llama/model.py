"""A GGUF model for the local engine: runs passes of llama.cpp over the sequences of its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Literal, NoReturn, cast

import torch
from torch import Tensor

from kp_core.engines.hf.sampling import sampler_of
from kp_core.engines.llama.context import Context
from kp_core.engines.llama.sequences import SequenceBuffer, SequencePool
from kp_core.engines.llama.state import StateLayout
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.grammar import Constraint
from kp_core.engines.local.tree import PrefixTree
from kp_core.errors import UnsupportedRequestError
from kp_core.plan import Sampling
from kp_core.rope import Rope

__all__ = ["LlamaModel"]

_PROBE = 8  # Tokens of the first state, from which the layout is read.


class LlamaModel:
    """Runs a model in a llama.cpp `context`, whose keys and values have `dtype`.

    Raises `ModelError` if the state of its sequences is not laid out as this release knows it.
    """

    batches, record = True, None
    device = torch.device("cpu")

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        self.context = context
        """The model and its KV."""
        lib, model = context.lib, context.model
        kind = context.metadata("general.architecture")
        width = int(lib.llama_model_n_embd(model)) // int(lib.llama_model_n_head(model))
        dims = (int(context.metadata(f"{kind}.attention.{side}_length") or width) for side in ("key", "value"))
        context.call(context.decode, [(0, 0, [0] * _PROBE)], "none")
        self._layout = StateLayout.measured(context.call(context.state, 0, 0, _PROBE), dtype, *dims)
        context.call(context.remove, 0)
        self.shape = self._layout.shape
        """Of the keys and values."""
        self.vocabulary = context.vocabulary
        self.max_positions = min(context.cells, int(lib.llama_model_n_ctx_train(model)))
        self.end_tokens = frozenset(
            token for token in range(self.vocabulary) if lib.llama_vocab_is_eog(context.vocab, token)
        )
        self.lacks = MappingProxyType(
            {
                "attention": "llama.cpp does not tell its attention weights",
                "bitwise": "llama.cpp rounds by how many tokens a pass has, and by who else is computed in it",
                "compose": "llama.cpp computes tokens only behind all others of their sequence",
            }
        )

    def pool(self, tree: PrefixTree, cache_bytes: int) -> SequencePool:  # noqa: ARG002 - the cells are the budget
        """The buffers of requests."""
        return SequencePool(self.context, self._layout, tree)

    def forward(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids`, `(1, new)`, behind the tokens of a buffer. Returns logits at the last one, `(1, vocabulary)`."""
        found = self._behind(buffer, ids[0].tolist(), "last" if logits else "none")
        return found[-1:] if logits else None

    def forward_all(self, ids: Tensor, buffer: KVBuffer) -> Tensor:
        """As `forward`, but returns the logits at every token, `(new, vocabulary)`."""
        return self._behind(buffer, ids[0].tolist(), "all")

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run `tokens` behind each buffer in one pass. Returns the logits at the last of each, `(rows, vocabulary)`."""
        if sum(map(len, tokens)) > self.context.batch_tokens:
            return torch.cat([self._behind(*row, "last")[-1:] for row in zip(buffers, tokens, strict=True)])
        return self._pass(buffers, tokens, "last")

    def rows(self, buffers: Sequence[KVBuffer], memory: object = None) -> Callable[[Sequence[int]], Tensor]:  # noqa: ARG002
        """A function that runs one token behind each buffer in one pass, and returns logits, `(rows, vocabulary)`."""
        return lambda tokens: self._pass(buffers, [(token,) for token in tokens], "last")

    @property
    def rope(self) -> Rope:
        """Raises `UnsupportedRequestError`."""
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {self.lacks['compose']}.")

    forward_among = forward_soft = _refuse

    def sampler(
        self, sampling: Sampling, prompt_ids: Sequence[int], constraint: Constraint | None
    ) -> Callable[[Tensor, int], int]:
        """See `sampler_of`."""
        return sampler_of(sampling, prompt_ids, self.device, constraint)

    def _behind(self, buffer: KVBuffer, ids: Sequence[int], outputs: Literal["none", "last", "all"]) -> Tensor:
        size = self.context.batch_tokens
        return torch.cat([self._pass([buffer], [ids[at : at + size]], outputs) for at in range(0, len(ids), size)])

    def _pass(
        self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]], outputs: Literal["none", "last", "all"]
    ) -> Tensor:
        """Run `tokens` behind each buffer in one pass; see `Context.decode`."""
        sequences = cast("Sequence[SequenceBuffer]", buffers)

        def decode() -> Tensor:
            logits = self.context.decode(
                [buffer.row(ids) for buffer, ids in zip(sequences, tokens, strict=True)], outputs
            )
            for buffer, ids in zip(sequences, tokens, strict=True):
                buffer.passed(buffer.length + len(ids))
            return torch.from_numpy(logits)

        return self.context.call(decode)
