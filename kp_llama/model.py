"""A GGUF model for the local engine: runs passes over sequences of a llama.cpp context, the buffers of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn, cast

import torch
from torch import Tensor

from kp_core import KVTensors
from kp_core.engines.hf.sampling import sampler_of
from kp_core.engines.local.buffer import BufferPool, CacheShape, KVBuffer
from kp_core.engines.local.tree import Name, PrefixTree
from kp_core.errors import ModelError, UnsupportedRequestError
from kp_core.plan.plan import Limit
from kp_core.rope import Rope
from kp_llama.context import Context, Tokens
from kp_llama.state import measured_shape, read_state, state_size, write_state

_PROBE = 8  # Tokens of the first state, from which the layout is read.


class LlamaModel:
    """Runs a model in a llama.cpp `context`, whose keys and values have `dtype`.

    Raises `ModelError` if the state of its sequences is not laid out as this release knows it.
    """

    forks = False

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        self.context = context
        lib, model = context.lib, context.model
        kind = context.metadata("general.architecture")
        width = int(lib.llama_model_n_embd(model)) // int(lib.llama_model_n_head(model))
        dims = (int(context.metadata(f"{kind}.attention.{side}_length") or width) for side in ("key", "value"))
        context.call(context.decode, [(0, 0, [0] * _PROBE)], "none")
        self.shape = measured_shape(context.call(context.state, 0, 0, _PROBE), dtype, *dims)
        context.call(context.remove, 0)
        self.vocabulary = context.vocabulary
        self.max_positions = min(context.cells, int(lib.llama_model_n_ctx_train(model)))
        self.end_tokens = frozenset(
            token for token in range(self.vocabulary) if lib.llama_vocab_is_eog(context.vocab, token)
        )
        self.lacks: Mapping[str, str] = {
            "attention": "llama.cpp does not tell its attention weights",
            "bitwise": "llama.cpp rounds by how many tokens a pass has, and by who else is computed in it",
            "compose": "llama.cpp computes tokens only behind all others of their sequence",
        }

    def pool(self, tree: PrefixTree, cache_bytes: int) -> SequencePool:  # noqa: ARG002 - the cells are the budget
        """The buffers of requests."""
        return SequencePool(self.context, self.shape, tree)

    def forward(self, ids: Sequence[int], buffer: KVBuffer, logits: int = 1) -> Tensor:
        """Run `ids` behind `buffer`. Returns the logits at the last `logits` of them, `(logits, vocabulary)`."""
        found = self._behind(buffer, ids, "none" if not logits else "last" if logits == 1 else "all")
        return found[len(found) - logits :]

    def ragged(self, buffers: Sequence[KVBuffer], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Model.ragged`. Rows of one buffer are computed one by one."""
        if len({*map(id, buffers)}) == len(buffers) and sum(map(len, tokens)) <= self.context.batch_tokens:
            return self._pass(buffers, tokens, "last")
        rows = list[Tensor]()
        for buffer, start, ids in zip(buffers, [buffer.length for buffer in buffers], tokens, strict=True):
            buffer.truncate(start)
            rows.append(self._behind(buffer, ids, "last")[-1:])
        return torch.cat(rows)

    def rows(self, buffers: Sequence[KVBuffer]) -> Callable[[Sequence[int]], Tensor]:
        """A function that runs one token behind each buffer in one pass, and returns logits, `(rows, vocabulary)`."""
        return lambda tokens: self._pass(buffers, [(token,) for token in tokens], "last")

    @property
    def rope(self) -> Rope:
        """Raises `UnsupportedRequestError`."""
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedRequestError(f"Tokens of this model stay where they were computed: {self.lacks['compose']}.")

    forward_among = forward_soft = _refuse

    sampler = staticmethod(sampler_of)

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
                [buffer.with_tokens(ids) for buffer, ids in zip(sequences, tokens, strict=True)], outputs
            )
            for buffer, ids in zip(sequences, tokens, strict=True):
                buffer.passed(buffer.length + len(ids))
            return torch.from_numpy(logits)

        return self.context.call(decode)


class SequenceBuffer(KVBuffer):
    """A buffer whose KV is in the cells of a sequence. `read` and `view_of` copy it."""

    def __init__(self, context: Context, shape: CacheShape, capacity: int) -> None:
        super().__init__(replace(shape, layers=()), 0)
        self.shape, self.capacity = shape, capacity
        self.id = context.free_ids.pop()
        """The number of the sequence in the context."""
        self._context, self._length = context, 0

    @property
    def length(self) -> int:
        """See `KVBuffer.length`. Only the thread of llama.cpp changes it."""
        return self._length

    def with_tokens(self, ids: Sequence[int]) -> Tokens:
        """`ids` behind the tokens of this sequence, for `Context.decode`."""
        return self.id, self._length, ids

    def passed(self, length: int) -> None:
        """See `KVBuffer.passed`."""
        self._length = length

    def fork(self, source: SequenceBuffer, tokens: int) -> None:
        """Begin with the first `tokens` tokens of `source`."""
        self._context.call(self._context.copy, source.id, self.id, 0, tokens)
        self._length, self.runs = tokens, source.runs

    def truncate(self, length: int) -> None:
        """See `KVBuffer.truncate`."""
        self._context.call(self._truncate, length)

    def append(self, *parts: KVTensors) -> None:
        """See `KVBuffer.append`."""
        for kv in parts:
            if kv.tokens:
                self._context.call(self._append, kv)

    def holds(self, kv: KVTensors) -> bool:  # noqa: ARG002 - as `KVBuffer`
        """See `KVBuffer.holds`."""
        return False

    def read(self, start: int, stop: int) -> KVTensors:
        """See `KVBuffer.read`."""
        return self.view_of(start, stop)

    def view_of(self, start: int, stop: int) -> KVTensors:
        """A copy of the tokens `start:stop`, at least one."""
        return read_state(self.shape, self._context.call(self._context.state, self.id, start, stop))

    def drop(self) -> None:
        """Free the cells that no other sequence has, and the sequence. Do not use the buffer afterwards."""
        self._context.call(self._truncate, 0)
        self._context.free_ids.append(self.id)

    def _truncate(self, length: int) -> None:
        self._context.remove(self.id, length)
        self._length = min(self._length, length)

    def _append(self, kv: KVTensors) -> None:
        write = partial(write_state, self.shape, kv, self._length)
        self._context.restore(self.id, state_size(self.shape, kv.tokens), write)
        self._length += kv.tokens


class SequencePool(BufferPool):
    """Gives sequences to requests, as far as the cells of the context go. The prefix tree has a budget of its own.

    A request forks the sequence that has most of its KV, in use or idle; other KV comes from the prefix tree. Attention
    looks at the cells of all sequences (with 20 idle packs of 1,000 tokens an answer takes 1.5 times as long), so a
    request drops all idle sequences that it does not go on from.

    `give` takes no lock, because garbage collection may call it in the thread of llama.cpp, for which the holder of a
    lock may be waiting. All other methods that change the pool are called in a `turn`.
    """

    def __init__(self, context: Context, shape: CacheShape, tree: PrefixTree) -> None:
        self._cell_bytes = shape.bytes_per_token
        super().__init__(shape, tree, context.cells * self._cell_bytes)
        self._context = context
        self._used: list[SequenceBuffer] = []
        self._idle: list[SequenceBuffer] = []

    def check(self, capacity: int) -> None:
        """Raise `ModelError` for a request that takes more cells than there are."""
        if capacity > self._context.cells:
            raise ModelError(
                f"The prompt and its answer may take {capacity:,} tokens; expected at most the {self._context.cells:,} "
                "cells of the context. Shorten the prompt, lower max_tokens, or load the engine with more `cells`."
            )

    def take(self, capacity: int, held: Sequence[tuple[Name, KVTensors]]) -> SequenceBuffer | None:
        """See `BufferPool.take`."""
        source = max((*self._idle, *self._used), key=lambda buffer: buffer.shared(held), default=None)
        shared = 0 if source is None else source.shared(held)
        if shared and source in self._idle:
            self._idle.remove(source)
            source.truncate(shared)
            buffer = source
        else:
            if not self._context.free_ids:
                self._drop_idle()
                return None
            buffer = SequenceBuffer(self._context, self._shape, capacity)
            if shared and source:
                buffer.fork(source, shared)
        self._drop_idle()
        if not self._has_cells(capacity - shared):
            buffer.drop()
            return None
        buffer.capacity = capacity
        self._used.append(buffer)
        try:
            buffer.load(held)
        except BaseException:
            self._used.remove(buffer)
            buffer.drop()
            raise
        return buffer

    def give(self, buffer: KVBuffer) -> None:
        """See `BufferPool.give`. Requests that wait look for themselves."""
        given = next(used for used in self._used if used is buffer)
        self._used.remove(given)
        self._idle.append(given)

    def clear(self) -> None:
        """See `BufferPool.clear`."""
        with self.turn(Limit()):
            self._drop_idle()

    def reserve(self, nbytes: int) -> bool:  # noqa: ARG002 - as `BufferPool`
        """There is no room outside the pool."""
        return False

    def free(self, nbytes: int) -> None:
        """See `BufferPool.free`; nothing was reserved."""

    def _has_room(self, size: int) -> bool:
        self._drop_idle()
        return bool(self._context.free_ids) and self._has_cells(size // self._cell_bytes)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().drop()

    def _has_cells(self, tokens: int) -> bool:
        """Whether `tokens` cells are free besides those that requests under way still need."""

        def free() -> int:
            growing = sum(buffer.capacity - buffer.length for buffer in self._used)
            return self._context.cells - self._context.used_cells(self._cell_bytes) - growing

        return self._context.call(free) >= tokens
