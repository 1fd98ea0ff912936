"""Prefill in canonical chunks, over the prefix tree and one pooled buffer."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kp_core.compose import Composer, ExactComposer
from kp_core.engines.hf.buffer import BufferPool, KVBuffer
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.request import Limit
from kp_core.fingerprint import ModelFingerprint
from kp_core.handle import Handle, find_handles
from kp_core.kv import KVTensors
from kp_core.pack import KnowledgePack
from kp_core.prefix import Path, PrefixTree
from kp_core.prompt import Prompt, Span
from kp_core.resolve import PackSource

_EXACT = ExactComposer()

__all__ = ["Cancelled", "Prefilled", "Prefiller"]

logger = logging.getLogger(__name__)


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The generation was cancelled during prefill."""


@dataclass
class Prefilled:
    """A prompt whose KV stands in `buffer`, with the logits behind it; must be given back."""

    buffer: KVBuffer
    path: Path
    logits: Tensor | None
    computed: int


class Prefiller:
    """Brings prompts into buffers, computing only what is neither in the tree nor in a pack."""

    def __init__(self, model: CausalModel, cache_bytes: int, chunk_tokens: int) -> None:
        self.model, self.chunk_tokens = model, chunk_tokens
        self.tree = PrefixTree(cache_bytes)
        self.pool = BufferPool(model.shape)
        # One prompt at a time: a second one that begins alike then finds the KV of the first.
        self._prefilling = threading.Lock()
        self._computing = threading.Lock()

    def forward(self, ids: tuple[int, ...], buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Logits `(vocabulary,)` behind `ids`, or `None` without `logits`; threads take turns."""
        found = self.forward_batch(torch.tensor([ids], device=self.model.device), buffer, logits=logits)
        return None if found is None else found[0]

    def forward_batch(self, ids: Tensor, buffer: KVBuffer, *, logits: bool = False) -> Tensor | None:
        """Logits `(batch, vocabulary)` behind `ids` of shape `(batch, new)`, or `None` without `logits`."""
        with self._computing:
            return self.model.forward(ids, buffer, logits=logits)

    def start(  # noqa: PLR0913 - the switches of a request
        self,
        prompt: Prompt,
        capacity: int,
        fingerprint: ModelFingerprint,
        source: PackSource | None = None,
        composer: Composer = _EXACT,
        *,
        reuse: bool = True,
        deterministic: bool = False,
        logits: bool = True,
        cancel: Limit | None = None,
    ) -> Prefilled:
        """Prefill `prompt` into a buffer for `capacity` tokens. Raises `Cancelled` when `cancel` is set meanwhile."""
        chunks = prompt.chunks(self.chunk_tokens)
        with self._prefilling:
            tree = self.tree if reuse else PrefixTree(0)
            path = tree.match(composer.name, prompt.token_ids, chunks, decoded=not deterministic, logits=logits)
            buffer = self.pool.take(capacity, path.runs)
            run = Prefilled(buffer, path, path.last.logits if path.tokens == len(prompt) else None, 0)
            device = self.model.shape.device
            try:
                packs = _PackKV(prompt, self.chunk_tokens, fingerprint, source, composer, device) if reuse else None
                for start, stop in chunks:
                    if stop > buffer.length:
                        self._chunk(run, prompt, max(start, buffer.length), stop, packs, logits=logits)
                    _check(cancel)
            except BaseException:
                self.finish(run)
                raise
            return run

    def finish(self, run: Prefilled) -> None:
        """Give buffer and path back; the buffer keeps what it holds for the next prompt that begins alike."""
        run.buffer.note(run.path.runs)
        run.path.release()
        self.pool.give(run.buffer)

    def _chunk(  # noqa: PLR0913
        self, run: Prefilled, prompt: Prompt, start: int, stop: int, packs: _PackKV | None, *, logits: bool
    ) -> None:
        ids = prompt.token_ids[start:stop]
        is_last = logits and stop == len(prompt)
        # Packs were computed behind canonical chunks, so behind anything else their KV is not exact.
        kv = packs.find(start, stop) if packs is not None and not is_last and run.path.is_canonical else None
        if kv is not None:
            run.buffer.append(kv)
        else:
            run.logits = self.forward(ids, run.buffer, logits=is_last)
            run.computed += stop - start
        if run.path.is_open and run.path.tokens == start:
            run.path.extend(ids, kv if kv is not None else run.buffer.read(start, stop), run.logits)


def _check(cancel: Limit | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled


@dataclass
class _PackKV:
    """The KV that the packs of one prompt bring, as the composer places it; read from the source once."""

    _prompt: Prompt
    _chunk_tokens: int
    _fingerprint: ModelFingerprint
    _source: PackSource | None
    _composer: Composer
    _device: torch.device
    _loaded: dict[int, KVTensors | None] = field(default_factory=dict)

    def find(self, start: int, stop: int) -> KVTensors | None:
        """KV of the chunk `start:stop`, when a pack has it."""
        for span in self._prompt.spans:
            if span.start <= start and stop <= span.stop:
                if span.start not in self._loaded:
                    self._loaded[span.start] = self._load(span)
                kv = self._loaded[span.start]
                return None if kv is None else kv.slice(start - span.start, stop - span.start)
        return None

    def _load(self, span: Span) -> KVTensors | None:
        pack, head = span.pack, self._prompt.head(span, self._chunk_tokens)
        if not (self._fits(span, pack) and self._composer.wants(pack, head)):
            return None
        if pack.kv is None and self._source is not None and find_handles(span.handle):
            pack = self._source.get(Handle.parse(span.handle))
        # What came from the source may have been replaced since it was looked at.
        if pack.kv is None or not (self._fits(span, pack) and self._composer.wants(pack, head)):
            logger.info("Pack %s has no KV for this place; it is computed from its text.", span.handle)
            return None
        return self._composer.place(pack, head).to(self._device)

    def _fits(self, span: Span, pack: KnowledgePack) -> bool:
        """Same model, same tokens."""
        return (
            pack.token_ids == self._prompt.token_ids[span.start : span.stop] and pack.fingerprint == self._fingerprint
        )
