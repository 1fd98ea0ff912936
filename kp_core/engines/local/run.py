"""Fills the KV buffer of a plan: from the prefix tree, from packs, by composers and by forward passes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace

from torch import Tensor

from kp_core.engines.local.buffer import BufferPool
from kp_core.engines.local.scheduler import Decoding, Scheduler
from kp_core.engines.local.tree import Path, PrefixTree
from kp_core.errors import PackError, PackNotFoundError
from kp_core.kv import KVTensors
from kp_core.packs.entry import Entry
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.plan.composer import Composer
from kp_core.plan.plan import Limit, Plan, Region
from kp_core.prompt.prompt import SoftTokens, Span
from kp_core.threads import in_threads, release_openmp_threads

logger = logging.getLogger(__name__)

_TOGETHER_TOKENS = 256
"""Longer text gets a pass of its own, which is faster: a pass shared with a composed region needs an attention mask."""


class Run:
    """The buffer with the KV of a plan's prompt, and how it was obtained. Call `close` at the end.

    Computes only the tokens whose KV is neither in the prefix tree nor in a pack.
    """

    def __init__(  # noqa: PLR0913 - as `LocalEngine.prefill`
        self,
        scheduler: Scheduler,
        pool: BufferPool,
        tree: PrefixTree,
        plan: Plan,
        capacity: int,
        *,
        limit: Limit,
        logits: bool,
        defers: bool = False,
    ) -> None:
        """Take a buffer for `capacity` tokens with the KV that `tree` has of the prompt; waits until there is room.

        With `logits`, the prompt is computed up to its last token, for the logits after it. With `defers`, a short end
        of the prompt is left to `decode_suffix` if others are computing.
        """
        self._scheduler, self._pool, self._model = scheduler, pool, scheduler.model
        self.plan, self._limit, self._needs_logits, self._may_defer = plan, limit, logits, defers
        while True:
            path = match(tree, plan, logits=logits)
            try:
                buffer = pool.take(capacity, path.held)
            except BaseException:
                path.release()
                raise
            if buffer is not None:
                break
            # The nodes of the path may take up the room. They were used last, so the tree evicts them last.
            path.release()
            pool.wait(capacity, limit)
        self.buffer, self.path, self.found = buffer, path, path.tokens
        cached_logits = path.last.logits if path.tokens == len(plan.prompt) else None
        self.logits = None if cached_logits is None else cached_logits.to(self._model.shape.device)
        """The logits after the prompt, then after each token."""
        self.computed = self.approximate = 0
        """Prompt tokens that were computed, and prompt tokens whose KV an approximate composer made."""
        self.kept: list[tuple[Entry, KVTensors]] = []
        """See `TokenStream.kept`."""
        self.deferred_suffix: tuple[int, ...] = ()
        """The last tokens of the prompt, if they are left to `decode_suffix`."""
        self._late: tuple[Region, Sequence[int]] | None = None
        """A composed region, and the places in the buffer of its tokens that the next pass must compute."""

    def fill(self, plain_kv: KVTensors | None = None) -> None:
        """Write the KV of the prompt. Closes the run on an error.

        A steered plan needs `plain_kv`, up to the end of its first steered region, unless the buffer has this region.
        """
        try:
            if self.plan.unsteered is None:
                self._fill_plain()
            else:
                self._fill_steered(plain_kv)
            self.path.bring_back(self.buffer.read, self._model.shape.device)
        except BaseException:
            self.close()
            raise

    def decode_suffix(self, decoding: Decoding) -> None:
        """Compute `deferred_suffix`, in one pass with the decoding steps of other requests."""
        start, ids, self.deferred_suffix = self.buffer.length, self.deferred_suffix, ()
        self.logits = self._scheduler.step(decoding, *ids)
        self.computed += len(ids)
        self._extend(start)

    def close(self, answer: Sequence[int] = ()) -> None:
        """Insert the decoded tokens of the `answer` into the tree, return the buffer to the pool, release the path."""
        prompt_tokens, stop = len(self.plan.prompt), self.buffer.length
        if answer:
            self.settle()
        if answer and stop > prompt_tokens and self.path.is_open and self.path.tokens == prompt_tokens:
            self.path.extend(tuple(answer[: stop - prompt_tokens]), self.buffer.read(prompt_tokens, stop))
        self.buffer.note(self.path.held)
        self.path.release()
        self._pool.give(self.buffer)
        release_openmp_threads()  # The next request may compute in another thread.

    def _fill_plain(self) -> None:
        for region in self.plan.regions:
            if region.composer is not None:
                self._compose(region, region.composer)
            else:
                self._bring(region)
        # The regions of a plan for `Engine.kv` end before the wanted tokens.
        self.compute(self.plan.regions[-1].stop if self.plan.regions else 0)
        self._collect()

    def _fill_steered(self, plain_kv: KVTensors | None) -> None:
        steered = [region for region in self.plan.regions if region.parts]
        if plain_kv is not None and self.buffer.length < steered[0].stop:
            self._alter(steered[0], plain_kv.slice(self.buffer.length, steered[0].stop))
        for region in steered:
            if region.stop > self.buffer.length:
                # Packs were compiled after plain KV, so their KV is wrong after altered KV.
                self.compute(region.start)
                self.compute(region.stop, apart=True)
                kv = self.buffer.read(region.start, region.stop)
                self.buffer.truncate(region.start)
                self._alter(region, kv)
        self.compute(len(self.plan.prompt))

    def _bring(self, region: Region) -> None:
        """Load the KV that a pack or the store has for a region. First computes the missing tokens before it."""
        # Only a forward pass gives logits, so it must compute the last token.
        stop = min(region.stop, len(self.plan.prompt) - 1) if self._needs_logits else region.stop
        if stop <= self.buffer.length:
            return
        span = region.span if region.source == "pack" else None
        if span is not None:
            if not span.soft and not span.pack.kv and find_handles(span.handle):
                pack = Entry.of_pack(span.handle, span.pack.fingerprint, span.pack.prefix, span.pack.token_ids)
                if self._bring_in_place(pack, region.start, region.stop, stop):
                    return
            if packs := self.load(region, self.plan):
                self._bring_kv(packs[0].kv, region.start, stop)
                return
        for (start, end), entry in self.plan.entries.items():
            last = min(end, stop)
            is_missing = region.start <= start < stop and last > self.buffer.length
            if is_missing and not self._bring_in_place(entry, start, end, last):
                self._bring_kv(self._read(entry), start, last)

    def _bring_kv(self, kv: KVTensors | None, start: int, stop: int) -> None:
        """Append the `kv` of tokens from `start` on, up to `stop`. First computes the missing tokens before it."""
        kv = kv and kv.slice(0, min(kv.tokens, stop - start))
        # States are known only at the end of stored KV, so one that is cut does not fit a model with states.
        if kv and start + kv.tokens > self.buffer.length and self._model.shape.fits(kv):
            self.compute(start)
            self._append(kv.slice(self.buffer.length - start, kv.tokens))

    def _bring_in_place(self, entry: Entry, start: int, end: int, stop: int) -> bool:
        """Read the KV of the tokens `start:end` from a file into the buffer, which then has those up to `stop`.

        Returns whether it is there. It takes no other memory: new memory costs more than reading. The tree then gets a
        copy of this and all that follows after the first token (`settle`). So this is for answers, while no other
        prompt waits that may begin with these tokens.
        """
        packs, model = self.plan.packs, self._model
        # Composers write KV into views of the buffer, too; on a GPU it is copied while the first layers compute.
        is_written = "compose" not in model.lacks and model.shape.device.type == "cpu" and not model.shape.states
        is_alone = self._may_defer and not self.plan.labels and not self._scheduler.may_join(1)
        if packs is None or not (is_written and is_alone):
            return False
        self.compute(start)
        filled = self.buffer.length
        known = self.buffer.read(start, filled)
        is_there = packs.read_into(self.buffer.view_of(start, end), entry)
        self.buffer.truncate(start)
        self.buffer.append(known)  # The tree has them already; a damaged file has written over them.
        if not is_there:
            return False
        self.buffer.append(self.buffer.view_of(filled, stop))
        self.path.owe(owes=True)
        self._check_limit()
        return True

    def settle(self) -> None:
        """Give the tree what it lacks of the prompt. Call it before a token behind the prompt is computed."""
        if self.path.owes:
            self._extend(self.path.tokens)
            self.path.owe(owes=False)
            self.buffer.note(self.path.held)

    def _read(self, entry: Entry) -> KVTensors | None:
        """The KV of the tokens that `entry` and the stored one have in common, on the CPU."""
        return None if self.plan.packs is None else self.plan.packs.read(entry)

    def _append(self, kv: KVTensors) -> None:
        """Write loaded KV to the buffer and to the tree; the tree keeps KV of the host there until `bring_back`."""
        start = self.buffer.length
        kv = kv if self.buffer.takes(kv) else self._model.shape.on_device(kv)
        self.buffer.append(kv)
        self._extend(start, kv)
        self._check_limit()

    def _compose(self, region: Region, composer: Composer) -> None:
        """Write the KV that a composer makes for a region."""
        if region.stop > self.buffer.length:
            self.compute(region.start)
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
                self._insert(region)
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
        spans, packs = region.spans, []
        size = sum(span.pack.stored_bytes for span in spans)
        stored = in_threads(lambda span: None if span.soft else _stored(span, plan), spans, size)
        for span, found in zip(spans, stored, strict=True):
            pack = found if span.soft is None else self._softened(span, span.soft)
            if pack is None or pack.kv is None:
                logger.info("Pack %s has no KV for this position; it is computed from its text.", span.handle)
                return None
            if not self._model.shape.fits(pack.kv):
                what = "KV of other layers or states than the model"
                logger.warning("Pack %s has %s; it is computed from its text.", span.handle, what)
                return None
            packs.append(pack)
        return packs

    def _move(self, kv: KVTensors, by: int, place: KVTensors) -> None:
        """See `Move`; the RoPE is measured when it is first needed."""
        self._model.rope.move(kv, by, place)

    def _softened(self, span: Span, soft: SoftTokens) -> KnowledgePack:
        """A pack between soft tokens with its KV: read from the store, or compiled now and kept there."""
        entry = self.plan.entries.get((span.start, span.stop))
        kv = None if entry is None else self._read(entry)
        if kv is None:
            before, ids = span.pack.prefix, soft.between(span.pack.token_ids)
            with self._scheduler.prefill(len(before) + len(span)):
                kv = self._model.forward_soft(before, soft.header, ids, soft.trailer)
            self.computed += len(span)
            if entry is not None:
                self.kept.append((entry, kv.to("cpu")))
        return replace(span.pack, kv=self._model.shape.on_device(kv))

    def _collect(self) -> None:
        """Collect the KV of `Plan.keep`."""
        states, end = dict[int, tuple[Tensor, ...]](), 0
        for _, kv in self.path.held:
            end += kv.tokens
            states[end] = kv.states
        for (start, stop), entry in self.plan.keep.items():
            if stop <= self.buffer.length:
                kv = replace(self.buffer.read(start, stop), states=states.get(stop, ()))
                if self._model.shape.fits(kv):
                    self.kept.append((entry, kv.to("cpu")))

    def compute(self, until: int, *, apart: bool = False) -> None:
        """Compute the tokens up to `until`, in passes of at most `pass_tokens`. The tree gets them unless `apart`.

        The pass over the last token of the prompt sets `logits`, if they are needed, or is left to `decode_suffix`.
        Where states of recurrent layers are to be known, a pass ends, too.
        """
        ends = sorted(self.plan.ends) if self._model.shape.states and not apart else []
        while (start := self.buffer.length) < until:
            stop = min(until, start + self._scheduler.pass_tokens, *ends[(at := bisect_right(ends, start)) : at + 1])
            ids, is_last = self.plan.prompt.token_ids[start:stop], self._needs_logits and stop == len(self.plan.prompt)
            if self._may_defer and is_last and self._late is None and self._scheduler.may_join(len(ids)):
                self.deferred_suffix = ids
                return
            computed = self._pass(ids, int(is_last))
            self.logits = computed[0] if is_last else None
            self.computed += stop - start
            if not apart:
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
            packs = self.plan.prompt.packs(begin, end)
            if not self.path.extend(ids, part_kv, logits, owners={owner} if owner else (), packs=packs):
                return

    def _pass(self, ids: Sequence[int], logits: int) -> Tensor:
        """Compute `ids`, and with them the tokens in `_late`, which completes their composed region."""
        if self._late is None:
            return self._scheduler.forward(ids, self.buffer, logits)
        (region, late_places), self._late = self._late, None
        stop = self.buffer.length + len(ids)
        last_logits = self._among([*late_places, *range(self.buffer.length, stop)], logits)
        self.buffer.passed(stop)
        self._insert(region)
        return last_logits

    def _among(self, places: Sequence[int], logits: int = 0) -> Tensor:
        """Compute the tokens of the prompt at `places`, of which some have tokens behind them."""
        ids = [self.plan.prompt.token_ids[at] for at in places]
        with self._scheduler.prefill(len(places)):
            return self._model.forward_among(ids, self.buffer, places, logits=logits)

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
            packs = self.plan.prompt.packs(region.start, region.stop)
            self.path.extend(ids, kv, owners=owners, packs=packs, label=region.label)

    def _check_limit(self) -> None:
        if self._limit.is_set():
            raise CancelledError


def match(tree: PrefixTree, plan: Plan, *, logits: bool = True) -> Path:
    """The longest path in the tree for the prompt of `plan`. Release it after use."""
    return tree.match(plan.prompt.token_ids, owners=plan.owners, labels=plan.labels, logits=logits)


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
