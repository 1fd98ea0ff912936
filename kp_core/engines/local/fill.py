"""Prefill in canonical chunks, over the prefix tree and one pooled buffer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kp_core.compose import Composer, ExactComposer
from kp_core.engines.hf.model import CausalModel
from kp_core.engines.local.buffer import BufferPool, KVBuffer
from kp_core.engines.local.steer import altered, steered_edges
from kp_core.engines.local.tree import Path, PrefixTree
from kp_core.engines.request import Limit
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackSource
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import Block

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

    def perplexity(self, run: Prefilled, tokens: Sequence[int]) -> float:
        """Perplexity per token of `tokens` behind `run`, which must have logits; leaves their KV in the buffer."""
        if run.logits is None:
            raise AssertionError("a prefilled prompt has logits")
        ids = torch.tensor([tokens], device=self.model.device)
        logits = run.logits[None]
        if len(tokens) > 1:
            with self._computing:
                logits = torch.cat([logits, self.model.forward_all(ids[:, :-1], run.buffer)])
        return float(torch.nn.functional.cross_entropy(logits.float(), ids[0].to(logits.device)).exp())

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
        blocks: Sequence[Block] = (),
    ) -> Prefilled:
        """Prefill `prompt` into a buffer for `capacity` tokens, with the KV of `blocks` altered.

        Raises `Cancelled` when `cancel` is set meanwhile.
        """
        with self._prefilling:
            tree = self.tree if reuse else PrefixTree(0)
            sources = _Sources(tree, fingerprint, source, composer, reuse, not deterministic, cancel)
            if blocks:
                return self._start_steered(prompt, capacity, blocks, sources, logits=logits)
            return self._start_plain(prompt, capacity, sources, logits=logits)

    def _start_plain(self, prompt: Prompt, capacity: int, sources: _Sources, *, logits: bool) -> Prefilled:
        chunks = prompt.chunks(self.chunk_tokens, sources.composer.wants)
        run = self._at(sources.match(prompt, chunks, {}, logits=logits), prompt, capacity)
        try:
            packs = _PackKV(prompt, self.chunk_tokens, sources, self.model.shape.device) if sources.reuse else None
            for start, stop in chunks:
                if stop > run.buffer.length:
                    self._chunk(run, prompt, max(start, run.buffer.length), stop, packs, logits=logits)
                _check(sources.cancel)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _start_steered(
        self, prompt: Prompt, capacity: int, blocks: Sequence[Block], sources: _Sources, *, logits: bool
    ) -> Prefilled:
        edges, at = steered_edges(prompt.chunks(self.chunk_tokens, sources.composer.wants), blocks)
        labels = {edge: block.label for edge, block in at.items()}
        path, first = sources.match(prompt, edges, labels, logits=logits), blocks[0]
        kv, computed = None, 0
        if path.tokens < first.stop:
            # The first block stands behind plain KV, so all of it comes from where plain prompts have theirs: the tree,
            # packs, and only then a forward pass.
            path.release()
            below = self._start_plain(prompt.until(first.stop), capacity, sources, logits=False)
            try:
                path = sources.match(prompt, edges, labels, logits=logits)
                kv, computed = below.buffer.read(path.tokens, max(first.stop, path.tokens)), below.computed
            finally:
                self.finish(below)
        run = self._at(path, prompt, capacity, computed)
        try:
            if kv is not None and kv.tokens:
                self._place(run, prompt, first, kv)
            for edge in edges:
                if edge[1] > run.buffer.length and edge in at:
                    self._compute_block(run, prompt, at[edge], sources.cancel)
                elif edge[1] > run.buffer.length:
                    # What packs bring was computed behind plain KV, so it does not fit behind altered KV.
                    self._chunk(run, prompt, max(edge[0], run.buffer.length), edge[1], None, logits=logits)
                _check(sources.cancel)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _at(self, path: Path, prompt: Prompt, capacity: int, computed: int = 0) -> Prefilled:
        """A run whose buffer holds what `path` found."""
        logits = path.last.logits if path.tokens == len(prompt) else None
        return Prefilled(self.pool.take(capacity, path.runs), path, logits, computed)

    def _compute_block(self, run: Prefilled, prompt: Prompt, block: Block, cancel: Limit | None) -> None:
        """Compute a block behind altered KV, then alter it."""
        for start, stop in block.pieces:
            self.forward(prompt.token_ids[start:stop], run.buffer, logits=False)
            run.computed += stop - start
            _check(cancel)
        kv = run.buffer.read(block.start, block.stop)
        run.buffer.truncate(block.start)
        self._place(run, prompt, block, kv)

    def _place(self, run: Prefilled, prompt: Prompt, block: Block, kv: KVTensors) -> None:
        """Write plain `kv`, which ends where `block` ends, to the buffer, the block's own part of it altered."""
        before = kv.tokens - (block.stop - block.start)
        if before > 0:
            run.buffer.append(kv.slice(0, before))
        steered = altered(kv.slice(before, kv.tokens), block)
        run.buffer.append(steered)
        if run.path.is_open and run.path.tokens == block.start:
            run.path.extend((*prompt.token_ids[block.start : block.stop], block.label), steered)

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


@dataclass(frozen=True)
class _Sources:
    """Where the KV of one request may come from."""

    tree: PrefixTree
    fingerprint: ModelFingerprint
    packs: PackSource | None
    composer: Composer
    reuse: bool
    decoded: bool
    cancel: Limit | None

    def match(
        self,
        prompt: Prompt,
        edges: Sequence[tuple[int, int]],
        labels: Mapping[tuple[int, int], int],
        *,
        logits: bool,
    ) -> Path:
        """What the tree has of `prompt`."""
        return self.tree.match(
            self.composer.name, prompt.token_ids, edges, decoded=self.decoded, logits=logits, labels=labels
        )


@dataclass
class _PackKV:
    """The KV that the packs of one prompt bring, as the composer places it; read from the source once."""

    _prompt: Prompt
    _chunk_tokens: int
    _sources: _Sources
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
        wants = self._sources.composer.wants
        pack, prefix = span.pack, self._prompt.prefix(span, self._chunk_tokens, wants)
        if not (self._fits(span, pack) and wants(pack, prefix)):
            return None
        if pack.kv is None and self._sources.packs is not None and find_handles(span.handle):
            pack = self._sources.packs.get(Handle.parse(span.handle))
        # What came from the source may have been replaced since it was looked at.
        if pack.kv is None or not (self._fits(span, pack) and wants(pack, prefix)):
            logger.info("Pack %s has no KV for this place; it is computed from its text.", span.handle)
            return None
        return self._sources.composer.place(pack, prefix).to(self._device)

    def _fits(self, span: Span, pack: KnowledgePack) -> bool:
        """Same model, same tokens."""
        return (
            pack.token_ids == self._prompt.token_ids[span.start : span.stop]
            and pack.fingerprint == self._sources.fingerprint
        )
