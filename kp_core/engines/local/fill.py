"""Fills KV buffers for plans: from the prefix tree, from packs, by composers and by forward passes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kp_core.compose import Composer, PacketComposer
from kp_core.engines.local.altered import altered
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.computing import Computing
from kp_core.engines.local.scheduler import BufferPool, Cancelled, Decoding, Scheduler, let_go
from kp_core.engines.local.tree import Path, PrefixTree
from kp_core.errors import KVShapeError, PackNotFoundError
from kp_core.kv import KVTensors
from kp_core.packs.codec import in_threads
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.plan import Limit, Plan, Region
from kp_core.prompt.prompt import Span

if TYPE_CHECKING:
    from kp_core.engines.hf.model import CausalModel

__all__ = ["Filler", "Run"]

logger = logging.getLogger(__name__)

_NEVER = Limit()
_TOGETHER_TOKENS = 256
"""Longer text gets a pass of its own, which is faster: a pass shared with a composed region needs an attention mask."""


@dataclass
class Run:
    """A plan being executed. `buffer` holds the KV of its prompt, and `logits` are the logits after the prompt.

    Pass it to `Filler.finish` at the end.
    """

    plan: Plan
    limit: Limit
    buffer: KVBuffer
    path: Path
    logits: Tensor | None
    computed: int = 0
    approximate: int = 0
    """Prompt tokens whose KV an approximate composer made."""
    late: tuple[Region, Sequence[int]] | None = None
    """A composed region, and the places in `buffer` of its tokens that the next pass must compute."""
    question: tuple[int, ...] = ()
    """The last tokens of the prompt, if `Filler.start` left them to `Filler.ask`."""


class Filler:
    """Prefills prompts into buffers. Computes only the tokens whose KV is neither in the prefix tree nor in a pack.

    A forward pass has at most `pass_tokens` tokens, so other requests wait no longer than that.
    """

    def __init__(self, model: CausalModel, cache_bytes: int, pass_tokens: int) -> None:
        self.model, self.pass_tokens = model, pass_tokens
        self.tree = self._tree(cache_bytes)
        self.pool = BufferPool(model.shape, self.tree, cache_bytes)
        self.scheduler = Scheduler(model)

    def _tree(self, cache_bytes: int) -> PrefixTree:
        return PrefixTree(cache_bytes, has_states=bool(self.model.shape.states))

    def forward(self, ids: Sequence[int], buffer: KVBuffer, *, logits: bool = True) -> Tensor | None:
        """Run `ids` after the tokens in `buffer`, and append their KV. Threads take turns.

        Returns the logits after the last token, `(vocabulary,)`; without `logits`, returns `None`.
        """
        with self.scheduler.prefill(len(ids)):
            tokens = torch.tensor([ids], device=self.model.device)
            batch_logits = self.model.forward(tokens, buffer, logits=logits)
        return None if batch_logits is None else batch_logits[0]

    def forward_several(self, buffers: Sequence[KVBuffer], ids: Sequence[Sequence[int]]) -> None:
        """Append the KV of `ids[i]` to `buffers[i]`, for all in one pass."""
        with self.scheduler.prefill(sum(map(len, ids))):
            self.model.ragged(buffers, ids)

    def losses(self, run: Run, tokens: Sequence[int]) -> list[float]:
        """The negative log-probability of each of `tokens` after `run`.

        Appends the KV of all of them but the last to the buffer.
        """
        if run.logits is None:
            raise AssertionError("a prefilled prompt has logits")
        ids = torch.tensor([tokens], device=self.model.device)
        logits = run.logits[None]
        if len(tokens) > 1:
            with self.scheduler.prefill(len(tokens)):
                logits = torch.cat([logits, self.model.forward_all(ids[:, :-1], run.buffer)])
        token_losses = torch.nn.functional.cross_entropy(logits.float(), ids[0].to(logits.device), reduction="none")
        return [float(loss) for loss in token_losses]

    def start(
        self,
        plan: Plan,
        capacity: int,
        *,
        logits: bool = True,
        asks: bool = False,
        limit: Limit = _NEVER,
    ) -> Run:
        """Prefill the prompt of `plan` into a buffer for `capacity` tokens.

        With `asks`, the end of the prompt may be left to `ask`, if it is short and other requests are computing.
        Waits until the buffer fits into the budget. Raises `CacheBudgetError` if it can never fit, and `Cancelled`
        at `limit`.
        """
        # One prompt at a time, so that a second prompt with the same beginning finds the KV of the first.
        with self.scheduler.coming(), self.pool.turn(limit):
            tree = self.tree if plan.reuse else self._tree(0)
            fill = self._steered if plan.below else self._plain
            return fill(plan, capacity, tree, limit, logits=logits, asks=asks and plan.reuse)

    def ask(self, run: Run, decoding: Decoding) -> None:
        """Compute the tokens that `start` left in `run.question`, in one pass with the steps of other requests."""
        start, ids, run.question = run.buffer.length, run.question, ()
        run.logits = self.scheduler.step(decoding, *ids)
        run.computed += len(ids)
        self._extend(run, start)

    def finish(self, run: Run) -> None:
        """Return the buffer to the pool and release the path.

        The buffer keeps its KV for the next prompt with the same beginning.
        """
        run.buffer.note(run.path.held)
        run.path.release()
        self.pool.give(run.buffer)
        let_go()  # The next request may compute in another thread.

    def match(self, plan: Plan, tree: PrefixTree | None = None, *, logits: bool = True) -> Path:
        """The longest path in the tree for the prompt of `plan`. Release it after use."""
        searched = self.tree if tree is None else tree
        return searched.match(plan.prompt.token_ids, owners=plan.owners, labels=plan.labels, logits=logits)

    def _plain(  # noqa: PLR0913 - as `start`
        self, plan: Plan, capacity: int, tree: PrefixTree, limit: Limit, *, logits: bool, asks: bool = False
    ) -> Run:
        run = self._at(plan, capacity, tree, limit, logits=logits)
        try:
            for region in plan.regions:
                if region.composer is not None:
                    self._compose(run, region)
                else:
                    self._bring(run, region, logits=logits)
            # The regions of a plan for `Engine.kv` end before the wanted tokens.
            self._compute(run, plan.regions[-1].stop if plan.regions else 0, logits=logits, asks=asks)
            self._leave(run)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _bring(self, run: Run, region: Region, *, logits: bool) -> None:
        """Load the KV that a pack or the store has for a region. First computes the missing tokens before it."""
        # Only a forward pass gives logits, so it must compute the last token.
        stop = min(region.stop, len(run.plan.prompt) - 1) if logits else region.stop
        if stop <= run.buffer.length:
            return
        kv = self._load(run, region) if region.source == "pack" else None
        if kv is not None:
            self._compute(run, region.start)
            filled = run.buffer.length
            if not kv.states or stop == region.stop:  # States are known only at the end of the pack.
                self._append(run, kv.slice(filled - region.start, stop - region.start))
            return
        for start, end in run.plan.kept.parts if run.plan.kept else ():
            if region.start <= start < stop and end > run.buffer.length:
                self._bring_kept(run, start, min(end, stop))

    def _bring_kept(self, run: Run, start: int, stop: int) -> None:
        """Load the KV that an earlier request left in the store for the tokens `start:stop`."""
        kv = run.plan.kept.read(start, stop) if run.plan.kept else None
        if kv is None or start + kv.tokens <= run.buffer.length or not self.model.shape.fits(kv):
            return
        self._compute(run, start)
        self._append(run, self.model.shape.placed(kv.slice(run.buffer.length - start, kv.tokens)))

    def _append(self, run: Run, kv: KVTensors) -> None:
        """Write loaded KV to the buffer and to the tree."""
        start = run.buffer.length
        run.buffer.append(kv)
        self._extend(run, start, kv)
        _check(run.limit)

    def _compose(self, run: Run, region: Region) -> None:
        """Write the KV that a composer makes for a region."""
        if region.stop > run.buffer.length:
            self._compute(run, region.start)
            kv = self._load(run, region)
            if kv is None:  # A forward pass then computes the region.
                return
            self._keep(run, region, kv)
        if region.composer is not None and not region.composer.exact:
            run.approximate += sum(map(len, region.spans))

    def _load(self, run: Run, region: Region) -> KVTensors | None:
        """The KV of a region from its pack or its composer, on the devices of the cache.

        `None` if the region must be computed from its text. Raises `KVShapeError` when the KV has another number of
        tokens than the region.
        """
        if region.source not in ("pack", "composed") or region.span is None or not run.plan.reuse:
            return None
        spans, composer, packs = region.spans, region.composer, []
        if isinstance(composer, PacketComposer):
            loaded: Sequence[KnowledgePack | None] = [self._wrapped(run, span, composer) for span in spans]
        else:
            loaded = in_threads(
                lambda span: _stored(span, run.plan), spans, sum(span.pack.stored_bytes for span in spans)
            )
        for span, pack in zip(spans, loaded, strict=True):
            if pack is None or pack.kv is None:
                logger.info("Pack %s has no KV for this position; it is computed from its text.", span.handle)
                return None
            if not self.model.shape.fits(pack.kv):
                logger.warning(
                    "Pack %s has KV of other layers or states than the model; it is computed from its text.",
                    span.handle,
                )
                return None
            packs.append(pack)
        kv = packs[0].kv if composer is None else self._composed(run, region, composer, packs)
        if kv is None or kv.tokens != len(region):
            raise KVShapeError(
                f"{'The pack has' if composer is None else f'The composer {composer.key!r} made'} KV of "
                f"{kv and kv.tokens} tokens; expected {len(region)}, as {region.span.handle} has at its position."
            )
        return self.model.shape.placed(kv)

    def _wrapped(self, run: Run, span: Span, composer: PacketComposer) -> KnowledgePack:
        """A wrapped pack with its KV: read from the store, or compiled now and kept there."""
        kv = run.plan.kept.read(span.start, span.stop) if run.plan.kept else None
        if kv is None:
            kv = composer.compile(span.pack, Computing(self.model, self.scheduler, run.buffer, run.plan.prompt))
            run.computed += len(span)
            if run.plan.kept and find_handles(span.handle):
                run.plan.kept.take(span.start, span.stop, kv.to("cpu"))
        return replace(span.pack, kv=self.model.shape.placed(kv))

    def _composed(self, run: Run, region: Region, composer: Composer, packs: Sequence[KnowledgePack]) -> KVTensors:
        """The KV that the composer of a region makes. Raises `KVShapeError` if it changed what `Forward.anew` gave."""
        forward = Computing(self.model, self.scheduler, run.buffer, run.plan.prompt, may_wait=_may_wait(run, region))
        kv = composer.fill(region, packs, forward)
        if forward.looked_behind:
            run.path.is_open = False  # This KV depends on the end of this prompt, so no other prompt may reuse it.
        if forward.late:
            if not run.buffer.holds(kv):
                raise KVShapeError(
                    f"The composer {composer.key!r} changed what `Forward.anew` gave; expected it as it is."
                )
            run.late = region, forward.late
        run.computed += min(forward.tokens, len(region))
        return kv

    def _leave(self, run: Run) -> None:
        """Collect the KV of all `wanted` parts, for the store."""
        if run.plan.kept is None:
            return
        states, end = dict[int, tuple[Tensor, ...]](), 0
        for _, kv in run.path.held:
            end += kv.tokens
            states[end] = kv.states
        for start, stop in run.plan.kept.wanted:
            if stop <= run.buffer.length:
                kv = replace(run.buffer.read(start, stop), states=states.get(stop, ()))
                if self.model.shape.fits(kv):
                    run.plan.kept.take(start, stop, kv.to("cpu"))

    def _steered(  # noqa: PLR0913 - as `start`
        self, plan: Plan, capacity: int, tree: PrefixTree, limit: Limit, *, logits: bool, asks: bool
    ) -> Run:
        if plan.below is None:
            raise AssertionError("a steered plan has a plain one below it")
        first_region = next(region for region in plan.regions if region.parts)
        run, kv = self._at(plan, capacity, tree, limit, logits=logits), None
        if run.buffer.length < first_region.stop:
            # Only plain KV precedes the first steered region. So its plain KV comes from the same sources as that of a
            # plain prompt: the tree, then packs, then a forward pass.
            self.finish(run)
            plain_run = self._plain(plan.below, capacity, tree, limit, logits=False)
            try:
                kv, computed = plain_run.buffer.read(0, first_region.stop), plain_run.computed
            finally:
                self.finish(plain_run)
            run = self._at(plan, capacity, tree, limit, logits=logits)
            run.computed = computed
        try:
            if kv is not None and (filled := run.buffer.length) < first_region.stop:
                self._alter(run, first_region, kv.slice(filled, first_region.stop))
            for region in plan.regions:
                if region.parts and region.stop > run.buffer.length:
                    # Packs were compiled after plain KV, so their KV is wrong after altered KV.
                    self._compute(run, region.start)
                    self._compute_steered(run, region)
            self._compute(run, len(plan.prompt), logits=logits, asks=asks)
        except BaseException:
            self.finish(run)
            raise
        return run

    def _at(self, plan: Plan, capacity: int, tree: PrefixTree, limit: Limit, *, logits: bool) -> Run:
        """A run whose buffer holds the KV that the tree has of the prompt. Waits until there is room for the buffer."""
        while True:
            path = self.match(plan, tree, logits=logits)
            try:
                buffer = self.pool.take(capacity, path.held)
            except BaseException:
                path.release()
                raise
            if buffer is not None:
                return Run(plan, limit, buffer, path, path.last.logits if path.tokens == len(plan.prompt) else None)
            # The nodes of the path may take up the room. They were used last, so the tree evicts them last.
            path.release()
            self.pool.wait(capacity, limit)

    def _compute(self, run: Run, until: int, *, logits: bool = False, asks: bool = False) -> None:
        """Compute the tokens up to `until`, in passes of at most `pass_tokens`.

        With `logits`, the pass over the last token of the prompt sets `run.logits`. With `asks`, that pass may be left
        to `ask`. The states of recurrent layers are known only at the end of a pass, so if the model has any, a pass
        also ends where a pack or a message ends.
        """
        ends = sorted(run.plan.ends) if self.model.shape.states else []
        while (start := run.buffer.length) < until:
            stop = min(until, start + self.pass_tokens, *ends[(at := bisect_right(ends, start)) : at + 1])
            ids, is_last = run.plan.prompt.token_ids[start:stop], logits and stop == len(run.plan.prompt)
            if asks and is_last and run.late is None and self.scheduler.may_join(len(ids)):
                run.question = ids
                return
            run.logits = self._pass(run, ids, logits=is_last)
            run.computed += stop - start
            self._extend(run, start)
            _check(run.limit)

    def _extend(self, run: Run, start: int, kv: KVTensors | None = None) -> None:
        """Insert the tokens of the buffer from `start` on into the tree, with a new node where a new owner begins.

        `kv` is their KV; by default it is copied from the buffer. Tokens behind a pack are found only by who may read
        it, so they need no node of their own, and neither do further packs of the same owner.
        """
        stop = run.buffer.length
        if not run.path.is_open or run.path.tokens != start or start == stop:
            return
        kv = run.buffer.read(start, stop) if kv is None else kv
        # A state may be larger than the KV of many tokens, so the tree keeps none inside a long text.
        kv = kv if stop in run.plan.ends or stop == len(run.plan.prompt) else replace(kv, states=())
        parts: list[tuple[int, int, str]] = []
        reached = run.path.owners
        for begin, end, owner in run.plan.prompt.owned(start, stop):
            if parts and (not owner or owner in reached):
                parts[-1] = parts[-1][0], end, parts[-1][2]
            else:
                parts.append((begin, end, owner))
            reached |= {owner}
        for begin, end, owner in parts:
            logits = run.logits if end == len(run.plan.prompt) else None
            ids, part_kv = run.plan.prompt.token_ids[begin:end], kv.slice(begin - start, end - start)
            if not run.path.extend(ids, part_kv, logits, owners={owner} if owner else ()):
                return

    def _pass(self, run: Run, ids: Sequence[int], *, logits: bool) -> Tensor | None:
        """As `forward`, but also compute the tokens in `run.late`, which completes their composed region."""
        if run.late is None:
            return self.forward(ids, run.buffer, logits=logits)
        (region, late_places), run.late = run.late, None
        stop = run.buffer.length + len(ids)
        places = [*late_places, *range(run.buffer.length, stop)]
        ids = [run.plan.prompt.token_ids[at] for at in places]
        with self.scheduler.prefill(len(places)):
            batch_logits = self.model.forward_among(ids, places, run.buffer, places, logits=logits)
        run.buffer.passed(stop)
        self._remember(run, region)
        return None if batch_logits is None else batch_logits[0]

    def _compute_steered(self, run: Run, region: Region) -> None:
        """Compute a steered region after altered KV, then alter it."""
        for start in range(region.start, region.stop, self.pass_tokens):
            ids = run.plan.prompt.token_ids[start : min(region.stop, start + self.pass_tokens)]
            self.forward(ids, run.buffer, logits=False)
            run.computed += len(ids)
            _check(run.limit)
        kv = run.buffer.read(region.start, region.stop)
        run.buffer.truncate(region.start)
        self._alter(run, region, kv)

    def _alter(self, run: Run, region: Region, kv: KVTensors) -> None:
        """Write plain `kv`, which ends where the steered `region` ends, and alter the part inside the region."""
        tokens_before = kv.tokens - len(region)
        if tokens_before > 0:
            self._append(run, kv.slice(0, tokens_before))
        self._keep(run, region, altered(kv.slice(tokens_before, kv.tokens), region))

    def _keep(self, run: Run, region: Region, kv: KVTensors) -> None:
        """Write the KV of a labelled region to the buffer, and to the tree as one node once all of it is computed."""
        is_of_buffer = run.buffer.holds(kv)
        run.buffer.append(kv)
        if run.late is None:
            self._remember(run, region, None if is_of_buffer else kv)

    def _remember(self, run: Run, region: Region, kv: KVTensors | None = None) -> None:
        """Insert a labelled region into the tree as one node: `kv`, or by default a copy from the buffer."""
        if run.path.is_open and run.path.tokens == region.start:
            kv = run.buffer.read(region.start, region.stop) if kv is None else kv
            ids = run.plan.prompt.token_ids[region.start : region.stop]
            owners = {owner for *_, owner in run.plan.prompt.owned(region.start, region.stop) if owner}
            run.path.extend(ids, kv, owners=owners, label=region.label)


def _stored(span: Span, plan: Plan) -> KnowledgePack | None:
    """The pack of a span with its KV; `None` if it is gone or is no longer the pack in the plan."""
    planned = pack = span.pack
    if pack.kv is None and plan.packs is not None and find_handles(span.handle):
        try:
            pack = plan.packs.get(Handle.parse(span.handle), planned.key)
        except PackNotFoundError:
            return None
    fields = ("token_ids", "prefix", "fingerprint")
    if any(getattr(pack, name) != getattr(planned, name) for name in fields):
        return None
    return pack if pack.token_ids == plan.prompt.token_ids[span.start : span.stop] else replace(pack, kv=None)


def _may_wait(run: Run, region: Region) -> bool:
    """Whether the pass over the text after `region` also computes its tokens: if this text is short, without packs."""
    next_region = next((candidate for candidate in run.plan.regions if candidate.start == region.stop), None)
    if next_region is None or next_region.source != "computed" or len(next_region) > _TOGETHER_TOKENS:
        return False
    return not any(span.start < next_region.stop and next_region.start < span.stop for span in run.plan.prompt.spans)


def _check(limit: Limit) -> None:
    if limit.is_set():
        raise Cancelled
