"""Fills KV buffers for plans: from the prefix tree, from packs, by composers and by forward passes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kp_core.compose import Composer, NaiveComposer, PacketComposer, SpliceComposer
from kp_core.engines.local.scheduler import Decoding, let_go
from kp_core.engines.local.tree import Path, PrefixTree
from kp_core.errors import PackError, PackNotFoundError
from kp_core.kv import KVTensors
from kp_core.packs.codec import in_threads
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.plan import Limit, Plan, Region
from kp_core.prompt.prompt import Span

if TYPE_CHECKING:
    from kp_core.engines.local.engine import LocalEngine

__all__ = ["Run", "attention", "match", "prefill"]

logger = logging.getLogger(__name__)

_NEVER = Limit()
_TOGETHER_TOKENS = 256
"""Longer text gets a pass of its own, which is faster: a pass shared with a composed region needs an attention mask."""


def prefill(  # noqa: PLR0913 - one keyword per thing a caller may ask for
    engine: LocalEngine,
    plan: Plan,
    capacity: int,
    *,
    logits: bool = True,
    asks: bool = False,
    limit: Limit = _NEVER,
) -> Run:
    """Prefill the prompt of `plan` into a buffer for `capacity` tokens.

    With `asks`, the end of the prompt may be left to `Run.ask`, if it is short and other requests are computing.
    Waits until the buffer fits into the budget. Raises `CacheBudgetError` if it can never fit, and `CancelledError`
    at `limit`.
    """
    # One prompt at a time, so that a second prompt with the same beginning finds the KV of the first.
    with engine.scheduler.coming(), engine.pool.turn(limit):
        tree = engine.tree if plan.reuse else PrefixTree(0, has_states=bool(engine.model.shape.states))
        begin_run = partial(Run, engine, plan, capacity, tree, limit, logits=logits, asks=asks and plan.reuse)
        run, plain_kv = begin_run(), None
        steered_stop = next((region.stop for region in plan.regions if region.parts), 0)
        if plan.below is not None and run.buffer.length < steered_stop:
            # Only plain KV precedes the first steered region. So its plain KV comes from the same sources as that of a
            # plain prompt: the tree, then packs, then a forward pass.
            run.close()
            plain_run = Run(engine, plan.below, capacity, tree, limit, logits=False)
            plain_run.fill()
            try:
                plain_kv, computed = plain_run.buffer.read(0, steered_stop), plain_run.computed
            finally:
                plain_run.close()
            run = begin_run()
            run.computed = computed
        run.fill(plain_kv)
        return run


def match(tree: PrefixTree, plan: Plan, *, logits: bool = True) -> Path:
    """The longest path in the tree for the prompt of `plan`. Release it after use."""
    return tree.match(plan.prompt.token_ids, owners=plan.owners, labels=plan.labels, logits=logits)


def attention(engine: LocalEngine, plan: Plan, layers: int | None) -> Tensor | None:
    """See `LocalEngine.attention`."""
    region = plan.regions[-1]
    run = prefill(engine, plan.until(region.start), len(plan.prompt), logits=False)
    try:
        packs, by_layer = run.load(region, plan), list[Tensor]()
        if packs is None:
            return None
        blank = run.write(region, SpliceComposer(), packs)
        ids, places = plan.prompt.token_ids[region.stop :], range(region.stop, len(plan.prompt))
        with engine.scheduler.prefill(len(ids)):
            engine.model.forward_among(
                ids,
                run.buffer,
                places,
                unseen=blank,
                weights=lambda share: by_layer.append(share[..., region.start : region.stop].amax(dim=1)),
                layers=layers,
            )
        return torch.stack(by_layer).float().cpu()
    finally:
        run.close()


class Run:
    """A plan being executed: a buffer with the KV of its prompt, and how it was obtained. Call `close` at the end.

    It computes only the tokens whose KV is neither in the prefix tree nor in a pack.
    """

    def __init__(  # noqa: PLR0913 - as `prefill`
        self,
        engine: LocalEngine,
        plan: Plan,
        capacity: int,
        tree: PrefixTree,
        limit: Limit,
        *,
        logits: bool,
        asks: bool = False,
    ) -> None:
        """Take a buffer with the KV that `tree` has of the prompt; waits until there is room for it.

        With `logits`, the prompt is computed up to its last token, for the logits after it.
        """
        self._engine, self._model, self.plan, self._limit = engine, engine.model, plan, limit
        self._needs_logits, self._may_ask = logits, asks
        while True:
            path = match(tree, plan, logits=logits)
            try:
                buffer = engine.pool.take(capacity, path.held)
            except BaseException:
                path.release()
                raise
            if buffer is not None:
                break
            # The nodes of the path may take up the room. They were used last, so the tree evicts them last.
            path.release()
            engine.pool.wait(capacity, limit)
        self.buffer, self.path = buffer, path
        logits_there = path.last.logits if path.tokens == len(plan.prompt) else None
        self.logits = None if logits_there is None else logits_there.to(engine.model.shape.device)
        """The logits after the prompt, then after each token."""
        self.computed = self.approximate = 0
        """Prompt tokens that were computed, and prompt tokens whose KV an approximate composer made."""
        self.question: tuple[int, ...] = ()
        """The last tokens of the prompt, if they are left to `ask`."""
        self._late: tuple[Region, Sequence[int]] | None = None
        # A composed region, and the places in the buffer of its tokens that the next pass must compute.

    def fill(self, plain_kv: KVTensors | None = None) -> None:
        """Write the KV of the prompt. Closes the run on an error.

        A steered plan needs `plain_kv`, up to the end of its first steered region, unless the buffer has this region.
        """
        try:
            if self.plan.below is None:
                self._fill_plain()
            else:
                self._fill_steered(plain_kv)
            self.path.place(self.buffer.read, self._model.shape.device)
        except BaseException:
            self.close()
            raise

    def ask(self, decoding: Decoding) -> None:
        """Compute the tokens in `question`, in one pass with the steps of other requests."""
        start, ids, self.question = self.buffer.length, self.question, ()
        self.logits = self._engine.scheduler.step(decoding, *ids)
        self.computed += len(ids)
        self._extend(start)

    def close(self, answer: Sequence[int] = ()) -> None:
        """Insert the decoded tokens of the `answer` into the tree, return the buffer to the pool, release the path."""
        prompt_tokens, stop = len(self.plan.prompt), self.buffer.length
        if answer and stop > prompt_tokens and self.path.is_open and self.path.tokens == prompt_tokens:
            self.path.extend(tuple(answer[: stop - prompt_tokens]), self.buffer.read(prompt_tokens, stop))
        self.buffer.note(self.path.held)
        self.path.release()
        self._engine.pool.give(self.buffer)
        let_go()  # The next request may compute in another thread.

    def _fill_plain(self) -> None:
        for region in self.plan.regions:
            if region.composer is not None:
                self._compose(region, region.composer)
            else:
                self._bring(region)
        # The regions of a plan for `Engine.kv` end before the wanted tokens.
        self._compute(self.plan.regions[-1].stop if self.plan.regions else 0)
        self._collect()

    def _fill_steered(self, plain_kv: KVTensors | None) -> None:
        steered = [region for region in self.plan.regions if region.parts]
        if plain_kv is not None and self.buffer.length < steered[0].stop:
            self._alter(steered[0], plain_kv.slice(self.buffer.length, steered[0].stop))
        for region in steered:
            if region.stop > self.buffer.length:
                # Packs were compiled after plain KV, so their KV is wrong after altered KV.
                self._compute(region.start)
                self._compute_steered(region)
        self._compute(len(self.plan.prompt))

    def _bring(self, region: Region) -> None:
        """Load the KV that a pack or the store has for a region. First computes the missing tokens before it."""
        # Only a forward pass gives logits, so it must compute the last token.
        stop = min(region.stop, len(self.plan.prompt) - 1) if self._needs_logits else region.stop
        if stop <= self.buffer.length:
            return
        packs = self.load(region, self.plan) if region.source == "pack" else None
        if packs and (kv := packs[0].kv):
            self._compute(region.start)
            filled = self.buffer.length
            if not kv.states or stop == region.stop:  # States are known only at the end of the pack.
                self._append(kv.slice(filled - region.start, stop - region.start))
            return
        for start, end in self.plan.kept.parts if self.plan.kept else ():
            if region.start <= start < stop and end > self.buffer.length:
                self._bring_kept(start, min(end, stop))

    def _bring_kept(self, start: int, stop: int) -> None:
        """Load the KV that an earlier request left in the store for the tokens `start:stop`."""
        kv = self.plan.kept.read(start, stop) if self.plan.kept else None
        if kv is None or start + kv.tokens <= self.buffer.length or not self._model.shape.fits(kv):
            return
        self._compute(start)
        self._append(kv.slice(self.buffer.length - start, kv.tokens))

    def _append(self, kv: KVTensors) -> None:
        """Write loaded KV to the buffer and to the tree, which gets it from the host as it is until `Path.place`."""
        start = self.buffer.length
        kv = kv if self.buffer.takes(kv) else self._model.shape.placed(kv)
        self.buffer.append(kv)
        self._extend(start, kv)
        self._check_limit()

    def _compose(self, region: Region, composer: Composer) -> None:
        """Write the KV that a composer makes for a region."""
        if region.stop > self.buffer.length:
            self._compute(region.start)
            packs = self.load(region, self.plan)
            if packs is None:  # A forward pass then computes the region.
                return
            places = self.write(region, composer, packs)
            self.computed += len(places)
            if places and _may_wait(self.plan, region):
                self._late = region, places
            else:
                if places:
                    self._among(places)
                # The tree takes a lone pack that stays as it is without a copy.
                kv = packs[0].kv if isinstance(composer, NaiveComposer) and len(packs) == 1 and not places else None
                self._insert(region, kv and self._model.shape.placed(kv))
        if not composer.exact:
            self.approximate += sum(map(len, region.spans))

    def write(self, region: Region, composer: Composer, packs: Sequence[KnowledgePack]) -> list[int]:
        """Let `composer` write a region behind the filled tokens. Returns the places that must then be computed.

        Raises `PackError` if the composer names places outside of the region.
        """
        room = self.buffer.view_of(region.start, region.stop)
        computed = composer.fill(region, packs, room, self._move)
        places = sorted({*region.between, *computed})
        if places and not 0 <= places[0] <= places[-1] < len(region):
            raise PackError(
                f"The composer {composer.key!r} wants the tokens {places[0]} to {places[-1]} of a region computed; "
                f"expected some of its {len(region)}."
            )
        self.buffer.append(room)
        return [region.start + place for place in places]

    def load(self, region: Region, plan: Plan) -> list[KnowledgePack] | None:
        """The packs of a region of `plan`, with their KV; `None` if one has none for its position."""
        if region.source not in ("pack", "composed") or region.span is None or not plan.reuse:
            return None
        spans, composer, packs = region.spans, region.composer, []
        if isinstance(composer, PacketComposer):
            loaded: Sequence[KnowledgePack | None] = [self._wrapped(span, composer) for span in spans]
        else:
            loaded = in_threads(lambda span: _stored(span, plan), spans, sum(span.pack.stored_bytes for span in spans))
        for span, pack in zip(spans, loaded, strict=True):
            if pack is None or pack.kv is None:
                logger.info("Pack %s has no KV for this position; it is computed from its text.", span.handle)
                return None
            if not self._model.shape.fits(pack.kv):
                logger.warning(
                    "Pack %s has KV of other layers or states than the model; it is computed from its text.",
                    span.handle,
                )
                return None
            packs.append(pack)
        return packs

    def _move(self, kv: KVTensors, by: int, place: KVTensors) -> None:
        """See `Move`; the RoPE is measured when it is first needed."""
        self._model.rope.move(kv, by, place)

    def _wrapped(self, span: Span, composer: PacketComposer) -> KnowledgePack:
        """A wrapped pack with its KV: read from the store, or compiled now and kept there."""
        kv = self.plan.kept.read(span.start, span.stop) if self.plan.kept else None
        if kv is None:
            before, ids = span.pack.prefix, composer.unwrapped(span.pack)
            with self._engine.scheduler.prefill(len(before) + len(span)):
                kv = self._model.forward_soft(before, composer.header, ids, composer.trailer)
            self.computed += len(span)
            if self.plan.kept and find_handles(span.handle):
                self.plan.kept.take(span.start, span.stop, kv.to("cpu"))
        return replace(span.pack, kv=self._model.shape.placed(kv))

    def _collect(self) -> None:
        """Collect the KV of all `wanted` parts, for the store."""
        if self.plan.kept is None:
            return
        states, end = dict[int, tuple[Tensor, ...]](), 0
        for _, kv in self.path.held:
            end += kv.tokens
            states[end] = kv.states
        for start, stop in self.plan.kept.wanted:
            if stop <= self.buffer.length:
                kv = replace(self.buffer.read(start, stop), states=states.get(stop, ()))
                if self._model.shape.fits(kv):
                    self.plan.kept.take(start, stop, kv.to("cpu"))

    def _compute(self, until: int) -> None:
        """Compute the tokens up to `until`, in passes of at most `pass_tokens`.

        The pass over the last token of the prompt sets `logits`, if they are needed, or is left to `ask`. Where states
        of recurrent layers are to be known, a pass ends, too.
        """
        ends = sorted(self.plan.ends) if self._model.shape.states else []
        while (start := self.buffer.length) < until:
            stop = min(until, start + self._engine.pass_tokens, *ends[(at := bisect_right(ends, start)) : at + 1])
            ids, is_last = self.plan.prompt.token_ids[start:stop], self._needs_logits and stop == len(self.plan.prompt)
            if self._may_ask and is_last and self._late is None and self._engine.scheduler.may_join(len(ids)):
                self.question = ids
                return
            self.logits = self._pass(ids, logits=is_last)
            self.computed += stop - start
            self._extend(start)
            self._check_limit()

    def _extend(self, start: int, kv: KVTensors | None = None) -> None:
        """Insert the tokens of the buffer from `start` on into the tree, with a new node where a new owner begins.

        `kv` is their KV; by default it is copied from the buffer. Whoever finds tokens behind a pack may read the pack,
        so these need no node of their own.
        """
        stop = self.buffer.length
        if not self.path.is_open or self.path.tokens != start or start == stop:
            return
        kv = self.buffer.read(start, stop) if kv is None else kv
        # A state may be larger than the KV of many tokens, so the tree keeps none inside a long text.
        kv = kv if stop in self.plan.ends or stop == len(self.plan.prompt) else replace(kv, states=())
        parts: list[tuple[int, int, str]] = []
        reached = self.path.owners
        for begin, end, owner in self.plan.prompt.owned(start, stop):
            if parts and (not owner or owner in reached):
                parts[-1] = parts[-1][0], end, parts[-1][2]
            else:
                parts.append((begin, end, owner))
            reached |= {owner}
        for begin, end, owner in parts:
            logits = self.logits if end == len(self.plan.prompt) else None
            ids, part_kv = self.plan.prompt.token_ids[begin:end], kv.slice(begin - start, end - start)
            if not self.path.extend(ids, part_kv, logits, owners={owner} if owner else ()):
                return

    def _pass(self, ids: Sequence[int], *, logits: bool) -> Tensor | None:
        """As `forward`, but also compute the tokens in `self._late`, which completes their composed region."""
        if self._late is None:
            return self._engine.forward(ids, self.buffer, logits=logits)
        (region, late_places), self._late = self._late, None
        stop = self.buffer.length + len(ids)
        last_logits = self._among([*late_places, *range(self.buffer.length, stop)], logits=logits)
        self.buffer.passed(stop)
        self._insert(region)
        return last_logits

    def _among(self, places: Sequence[int], *, logits: bool = False) -> Tensor | None:
        """Compute the tokens of the prompt at `places`, of which some have tokens behind them."""
        ids = [self.plan.prompt.token_ids[at] for at in places]
        with self._engine.scheduler.prefill(len(places)):
            batch_logits = self._model.forward_among(ids, self.buffer, places, logits=logits)
        return None if batch_logits is None else batch_logits[0]

    def _compute_steered(self, region: Region) -> None:
        """Compute a steered region after altered KV, then alter it."""
        for start in range(region.start, region.stop, self._engine.pass_tokens):
            ids = self.plan.prompt.token_ids[start : min(region.stop, start + self._engine.pass_tokens)]
            self._engine.forward(ids, self.buffer, logits=False)
            self.computed += len(ids)
            self._check_limit()
        kv = self.buffer.read(region.start, region.stop)
        self.buffer.truncate(region.start)
        self._alter(region, kv)

    def _alter(self, region: Region, kv: KVTensors) -> None:
        """Write plain `kv`, which ends where the steered `region` ends, and alter the part inside the region."""
        tokens_before = kv.tokens - len(region)
        if tokens_before > 0:
            self._append(kv.slice(0, tokens_before))
        kv = region.steered(kv.slice(tokens_before, kv.tokens))
        self.buffer.append(kv)
        self._insert(region, kv)

    def _insert(self, region: Region, kv: KVTensors | None = None) -> None:
        """Insert a labelled region into the tree as one node: `kv`, or by default a copy from the buffer."""
        if self.path.is_open and self.path.tokens == region.start:
            kv = self.buffer.read(region.start, region.stop) if kv is None else kv
            ids = self.plan.prompt.token_ids[region.start : region.stop]
            owners = {owner for *_, owner in self.plan.prompt.owned(region.start, region.stop) if owner}
            self.path.extend(ids, kv, owners=owners, label=region.label)

    def _check_limit(self) -> None:
        if self._limit.is_set():
            raise CancelledError


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


def _may_wait(plan: Plan, region: Region) -> bool:
    """Whether the pass over the text after `region` also computes its tokens: if this text is short, without packs."""
    next_region = next((candidate for candidate in plan.regions if candidate.start == region.stop), None)
    if next_region is None or next_region.source != "computed" or len(next_region) > _TOGETHER_TOKENS:
        return False
    return not any(span.start < next_region.stop and next_region.start < span.stop for span in plan.prompt.spans)
