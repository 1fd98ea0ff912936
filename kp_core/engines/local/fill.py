"""Filling a plan: the KV of a prompt into one pooled buffer, from the prefix tree, packs, composers and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kp_core.engines.local.altered import altered
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.model import LocalModel
from kp_core.engines.local.openmp import let_go
from kp_core.engines.local.packs import PackKV
from kp_core.engines.local.pool import BufferPool, Cancelled
from kp_core.engines.local.scheduler import Decoding, Scheduler
from kp_core.engines.local.tree import Path, PrefixTree
from kp_core.kv import KVTensors
from kp_core.plan import Limit, Plan, Region
from kp_core.prompt.prompt import Prompt

__all__ = ["Filled", "Filler"]


@dataclass
class Filled:
    """A prompt whose KV stands in `buffer`, with the logits behind it; must be given back."""

    buffer: KVBuffer
    path: Path
    logits: Tensor | None
    computed: int
    approximate: int = 0
    """Tokens whose KV an approximate composer made."""
    late: tuple[Region, Sequence[int], Sequence[int]] | None = None
    """A composed region, and places and ids of its tokens that the next pass computes."""
    question: tuple[int, ...] = ()
    """The last tokens of the prompt, where they are left to `Filler.ask`."""


class Filler:
    """Brings prompts into buffers, computing only what is neither in the tree nor in a pack."""

    def __init__(self, model: LocalModel, cache_bytes: int, chunk_tokens: int) -> None:
        self.model, self.chunk_tokens = model, chunk_tokens
        self.tree = self._tree(cache_bytes)
        self.pool = BufferPool(model.shape, self.tree, cache_bytes)
        self.scheduler = Scheduler(model)
        self._packs = PackKV(model, self.scheduler)

    def _tree(self, cache_bytes: int) -> PrefixTree:
        return PrefixTree(cache_bytes, has_states=bool(self.model.shape.states))

    def forward(
        self, ids: Sequence[int], buffer: KVBuffer, *, logits: bool = True, parts: Sequence[int] = ()
    ) -> Tensor | None:
        """Logits `(vocabulary,)` behind `ids`, or `None` without `logits`; threads take turns."""
        with self.scheduler.prefill(len(ids)):
            tokens = torch.tensor([ids], device=self.model.device)
            found = self.model.forward(tokens, buffer, logits=logits, parts=parts)
        return None if found is None else found[0]

    def forward_batch(self, ids: Tensor, buffer: KVBuffer) -> None:
        """Write the KV of `ids`, of shape `(batch, new)`."""
        with self.scheduler.prefill(ids.shape[1]):
            self.model.forward(ids, buffer, logits=False)

    def losses(self, run: Filled, tokens: Sequence[int]) -> list[float]:
        """Minus the logarithm of the probability of each of `tokens` behind `run`; leaves their KV in the buffer."""
        if run.logits is None:
            raise AssertionError("a prefilled prompt has logits")
        ids = torch.tensor([tokens], device=self.model.device)
        logits = run.logits[None]
        if len(tokens) > 1:
            with self.scheduler.prefill(len(tokens)):
                logits = torch.cat([logits, self.model.forward_all(ids[:, :-1], run.buffer)])
        found = torch.nn.functional.cross_entropy(logits.float(), ids[0].to(logits.device), reduction="none")
        return [float(loss) for loss in found]

    def start(self, plan: Plan, capacity: int, *, logits: bool = True, asks: bool = False) -> Filled:
        """Prefill the prompt of `plan` into a buffer for `capacity` tokens; raises `Cancelled` at its limit.

        With `asks` a short question at its end may be left to `ask`, where others compute, too. What does not fit into
        the budget waits; raises `CacheBudgetError` where it never will.
        """
        # One prompt at a time: a second one that begins alike then finds the KV of the first.
        with self.scheduler.coming(), self.pool.turn(plan.limit):
            tree = self.tree if plan.reuse else self._tree(0)
            fill = self._steered if plan.below else self._plain
            return fill(plan, capacity, tree, logits=logits, asks=asks and plan.reuse and not plan.alone)

    def ask(self, run: Filled, decoding: Decoding) -> None:
        """Compute the question that `start` has left, in one pass with what others compute."""
        start, ids, run.question = run.buffer.length, run.question, ()
        run.logits = self.scheduler.step(decoding, *ids)
        run.computed += len(ids)
        if run.path.is_open and run.path.tokens == start:
            kv, is_shared = run.buffer.read(start, start + len(ids)), decoding.is_shared
            # A pass with others rounds as decoding does, and is found as that is.
            run.path.extend(ids, kv, None if is_shared else run.logits, is_decoded=is_shared)

    def finish(self, run: Filled) -> None:
        """Give buffer and path back; the buffer keeps what it holds for the next prompt that begins alike."""
        run.buffer.note(run.path.runs)
        run.path.release()
        self.pool.give(run.buffer)
        let_go()  # The next request may come in another thread.

    def match(self, plan: Plan, tree: PrefixTree | None = None, *, logits: bool = True) -> Path:
        """What the tree has of a prompt; must be released."""
        decoded = not plan.deterministic
        ids = plan.prompt.token_ids
        found = self.tree if tree is None else tree
        return found.match(ids, plan.edges, decoded=decoded, logits=logits, labels=plan.labels)

    def _plain(self, plan: Plan, capacity: int, tree: PrefixTree, *, logits: bool, asks: bool = False) -> Filled:
        run = self._at(plan, capacity, tree, logits=logits)
        try:
            self._packs.prefetch(plan, run.buffer.length)
            for region in plan.regions:
                is_composed, is_there = region.composer is not None, region.stop <= run.buffer.length
                kv = None if is_there else self._packs.load(region, plan, run)
                if region.composer is not None and (kv is not None or is_there):
                    run.approximate += 0 if region.composer.exact else sum(map(len, region.spans))
                if is_composed and kv is not None:
                    self._keep(run, plan.prompt, region, kv)
                self._chunks(run, plan, region, kv, logits=logits, asks=asks)
            self._leave(run, plan)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _leave(self, run: Filled, plan: Plan) -> None:
        """Give what is to be kept to the store: canonical KV alone, which a cold run would compute bit for bit."""
        until = run.buffer.length if run.path.is_canonical else run.path.canonical_tokens
        ends = accumulate(each.kv.tokens for each in run.path.runs)
        states = dict(zip(ends, (each.kv.states for each in run.path.runs), strict=True))
        for start, stop in plan.kept.wanted if plan.kept else ():
            if plan.kept and stop <= until:
                kv = replace(run.buffer.read(start, stop), states=states.get(stop, ()))
                if self.model.shape.fits(kv):
                    plan.kept.take(start, stop, kv.to("cpu"))

    def _steered(self, plan: Plan, capacity: int, tree: PrefixTree, *, logits: bool, asks: bool) -> Filled:
        if plan.below is None:
            raise AssertionError("a steered plan has a plain one below it")
        first = next(region for region in plan.regions if region.block)
        run, kv = self._at(plan, capacity, tree, logits=logits), None
        if run.buffer.length < first.stop:
            # The first block stands behind plain KV, so all of it comes from where plain prompts have theirs: the tree,
            # packs, and only then a forward pass.
            self.finish(run)
            below = self._plain(plan.below, capacity, tree, logits=False)
            try:
                kv, computed = below.buffer.read(0, first.stop), below.computed
            finally:
                self.finish(below)
            run = self._at(plan, capacity, tree, logits=logits)
            run.computed = computed
        try:
            if kv is not None and (done := run.buffer.length) < first.stop:
                self._alter(run, plan.prompt, first, kv.slice(done, first.stop))
            for region in plan.regions:
                if region.stop <= run.buffer.length:
                    continue
                if region.block:
                    self._compute_block(run, plan, region)
                    continue
                # What packs bring was computed behind plain KV, so it does not fit behind altered KV.
                self._chunks(run, plan, region, None, logits=logits, asks=asks)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _at(self, plan: Plan, capacity: int, tree: PrefixTree, *, logits: bool) -> Filled:
        """A run whose buffer holds what the tree has of a prompt; waits until there is room for it."""
        while True:
            path = self.match(plan, tree, logits=logits)
            try:
                buffer = self.pool.take(capacity, path.runs)
            except BaseException:
                path.release()
                raise
            if buffer is not None:
                return Filled(buffer, path, path.last.logits if path.tokens == len(plan.prompt) else None, 0)
            # What was found may be in the way itself; it was used last, so it leaves last.
            path.release()
            self.pool.wait(capacity, plan.limit)

    def _chunks(  # noqa: PLR0913
        self, run: Filled, plan: Plan, region: Region, ready: KVTensors | None, *, logits: bool, asks: bool
    ) -> None:
        """Bring the chunks of a region in: from the KV that is `ready` for all of it, or by forward passes."""
        waiting: list[tuple[int, int]] = []
        for begin, stop in region.chunks:
            start = max(begin, run.buffer.length)
            if stop > start:
                ids = plan.prompt.token_ids[start:stop]
                # The logits behind a prompt are known to a forward pass alone. And packs were compiled behind canonical
                # chunks: behind decoded tokens their KV is not exact.
                is_last = logits and stop == len(plan.prompt)
                is_wanted = plan.kept is not None and (begin, stop) in plan.kept.wanted
                if asks and is_last and not is_wanted and run.late is None and self.scheduler.may_join(len(ids)):
                    self._compute(run, plan, waiting, logits=False)
                    run.question = ids
                    return
                kv = None
                if run.path.is_canonical and not is_last and run.late is None:
                    if ready is not None:
                        kv = ready.slice(start - region.start, stop - region.start)
                    elif (
                        plan.kept is not None and (read := plan.kept.read(start, stop)) and self.model.shape.fits(read)
                    ):
                        kv = self._packs.placed(read)
                if kv is not None or (waiting and stop - waiting[0][0] > self.chunk_tokens):
                    self._compute(run, plan, waiting, logits=False)
                    waiting = []
                if kv is not None:
                    run.buffer.append(kv)
                    self._extend(run, plan, start, stop, kv)
                else:
                    waiting.append((start, stop))
                    if is_last or not self.model.joins or run.late is not None:
                        self._compute(run, plan, waiting, logits=is_last)
                        waiting = []
            _check(plan.limit)
        self._compute(run, plan, waiting, logits=False)
        _check(plan.limit)

    def _compute(self, run: Filled, plan: Plan, chunks: Sequence[tuple[int, int]], *, logits: bool) -> None:
        """Compute chunks that follow one another in one pass, in which each has the bits of a pass of its own."""
        if not chunks:
            return
        begin, end = chunks[0][0], chunks[-1][1]
        parts = [stop - start for start, stop in chunks]
        run.logits = self._pass(run, plan.prompt, plan.prompt.token_ids[begin:end], parts, logits=logits)
        run.computed += end - begin
        for start, stop in chunks:
            self._extend(run, plan, start, stop, None)

    def _extend(self, run: Filled, plan: Plan, start: int, stop: int, kv: KVTensors | None) -> None:
        """Give a chunk that stands in the buffer to the tree."""
        if run.path.is_open and run.path.tokens == start:
            kv = run.buffer.read(start, stop) if kv is None else kv
            # A state may take more room than the KV of a chunk: inside a long text it is not kept.
            kv = kv if stop in plan.ends else replace(kv, states=())
            is_end = stop == run.buffer.length
            run.path.extend(plan.prompt.token_ids[start:stop], kv, run.logits if is_end else None)

    def _pass(
        self, run: Filled, prompt: Prompt, ids: Sequence[int], parts: Sequence[int], *, logits: bool
    ) -> Tensor | None:
        """As `forward`, together with what a composer left to this pass; its region is then whole."""
        if run.late is None:
            return self.forward(ids, run.buffer, logits=logits, parts=parts)
        (region, places, late), run.late = run.late, None
        stop = run.buffer.length + len(ids)
        places = [*places, *range(run.buffer.length, stop)]
        with self.scheduler.prefill(len(places)):
            found = self.model.forward_among([*late, *ids], places, run.buffer, places, logits=logits)
        run.buffer.passed(stop)
        self._remember(run, prompt, region)
        return None if found is None else found[0]

    def _compute_block(self, run: Filled, plan: Plan, region: Region) -> None:
        """Compute a block behind altered KV, then alter it."""
        for start, stop in region.chunks:
            self.forward(plan.prompt.token_ids[start:stop], run.buffer, logits=False)
            run.computed += stop - start
            _check(plan.limit)
        kv = run.buffer.read(region.start, region.stop)
        run.buffer.truncate(region.start)
        self._alter(run, plan.prompt, region, kv)

    def _alter(self, run: Filled, prompt: Prompt, region: Region, kv: KVTensors) -> None:
        """Write plain `kv`, which ends where the block of `region` ends, with the block's own part of it altered."""
        before = kv.tokens - len(region)
        if before > 0:
            run.buffer.append(kv.slice(0, before))
        if region.block is None:
            raise AssertionError("a steered region has a block")
        self._keep(run, prompt, region, altered(kv.slice(before, kv.tokens), region.block))

    def _keep(self, run: Filled, prompt: Prompt, region: Region, kv: KVTensors) -> None:
        """Write the KV of a labelled region to the buffer, and to the tree as one node."""
        is_of_buffer = run.buffer.holds(kv)
        run.buffer.append(kv)
        if run.late is None:
            self._remember(run, prompt, region, None if is_of_buffer else kv)

    def _remember(self, run: Filled, prompt: Prompt, region: Region, kv: KVTensors | None = None) -> None:
        """Give a labelled region to the tree, as one node: `kv`, or what stands in the buffer."""
        # What depends on what stands behind it is found by no other prompt.
        is_kept = getattr(region.composer, "keeps", True)
        if is_kept and run.path.is_open and run.path.tokens == region.start:
            kv = run.buffer.read(region.start, region.stop) if kv is None else kv
            run.path.extend((*prompt.token_ids[region.start : region.stop], region.label), kv)


def _check(limit: Limit) -> None:
    if limit.is_set():
        raise Cancelled
