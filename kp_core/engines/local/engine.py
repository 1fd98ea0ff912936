"""The engine for one machine: runs plans with a local model.

A `Run` fills the KV buffer of a plan: from the prefix tree, from packs, by composers and by forward passes.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kp_core.compose import Composer, NaiveComposer, PacketComposer, SpliceComposer
from kp_core.engines.local.buffer import KVBuffer
from kp_core.engines.local.grammar import Grammars
from kp_core.engines.local.model import Model
from kp_core.engines.local.scheduler import Decoding, Scheduler
from kp_core.engines.local.tree import Node, Path, PrefixTree
from kp_core.errors import BusyError, ModelChangedError, ModelError, PackError, PackNotFoundError
from kp_core.kv import KVTensors
from kp_core.packs.codec import in_threads
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack
from kp_core.plan.engine import CAPABILITIES, TokenStream
from kp_core.plan.plan import Limit, Plan, Region
from kp_core.prompt.prompt import Span
from kp_core.threads import check_process, let_go, make_anew
from kp_core.tools import Scores

__all__ = ["LocalEngine", "Run"]

logger = logging.getLogger(__name__)

_WINDOW = 256
"""Plans of `kv` examined together: enough to find several with the same prefix, few enough to hold in memory."""
_MOST_TEXTS, _MOST_TOKENS = 16, 512  # Of one pass.
_PACE_TOKENS = 128  # Tokens of the pass that is timed.
_NEVER = Limit()
_TOGETHER_TOKENS = 256
"""Longer text gets a pass of its own, which is faster: a pass shared with a composed region needs an attention mask."""


class LocalEngine:
    """Runs plans with a `Model`. It has all capabilities that the model allows.

    `identity` gives the fingerprint, and may take seconds. `check` is called before each request, and raises when the
    model has changed. `renew` gives a model of the weights as they are now, by which both go from then on.
    `cache_bytes` is the budget for all KV on the device: the buffers of requests and the prefix tree. What the tree
    evicts moves to host memory, up to `host_cache_bytes`, unless layers are on several devices. `pass_tokens` is the
    most tokens of one pass. Several threads may call it.
    """

    def __init__(  # noqa: PLR0913 - what it is made of
        self,
        model: Model,
        tokenizer: Any,  # noqa: ANN401
        *,
        identity: Callable[[], ModelFingerprint],
        check: Callable[[], None],
        cache_bytes: int,
        pass_tokens: int,
        host_cache_bytes: int = 0,
        renew: Callable[[], Model] | None = None,
    ) -> None:
        self.tokenizer, self._identity, self._check, self._renew = tokenizer, identity, check, renew
        self.pass_tokens, self._cache_bytes, self._host_cache_bytes = pass_tokens, cache_bytes, host_cache_bytes
        self._run_model(model)
        make_anew(self)

    def forked(self) -> None:
        """In a forked process: begin with nothing in memory. Other threads may have held locks, KV and buffers."""
        if self.model.forks:
            self._run_model(self.model)
        else:
            self._check = partial(check_process, os.getppid(), "This model", ModelError)

    def _run_model(self, model: Model) -> None:
        """Make all that depends on the model, with nothing in memory."""
        self.model = model
        self.max_positions = model.max_positions
        self.bytes_per_token, self.state_bytes = model.shape.bytes_per_token, model.shape.state_bytes
        """Bytes of KV per token, and of the states of recurrent layers at each end of a pack or a message."""
        host_bytes = 0 if model.shape.devices else self._host_cache_bytes
        self.tree = PrefixTree(self._cache_bytes, has_states=bool(model.shape.states), host_bytes=host_bytes)
        """The KV that prompts with the same beginning share."""
        self.pool = model.pool(self.tree, self._cache_bytes)
        """The buffers of requests."""
        self.scheduler = Scheduler(model, self.free_memory)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        self._end_tokens = frozenset(model.end_tokens | ({eos} if isinstance(eos, int) else set()))
        self._grammars = Grammars(self.tokenizer, model.vocabulary, self._end_tokens)

    @property
    def identity(self) -> ModelFingerprint:
        """See `Engine.identity`."""
        return self._identity()

    @property
    def supports(self) -> frozenset[str]:
        """All capabilities except those that the model lacks."""
        return frozenset(CAPABILITIES) - frozenset(self.lacks)

    @property
    def lacks(self) -> Mapping[str, str]:
        """See `Engine.lacks`."""
        return self.model.lacks

    @property
    def cached_bytes(self) -> int:
        """Bytes of KV in the prefix tree."""
        return self.tree.nbytes

    def run(self, plan: Plan) -> TokenStream:
        """See `Engine.run`.

        Raises `ToolError` for a grammar that cannot be compiled, `SamplingError` when no answer of the grammar fits
        into the token budget, and `CacheBudgetError` for a request larger than `cache_bytes`.
        """
        self._check()
        self.pool.check(len(plan.prompt) + (len(plan.forced) or plan.token_budget))
        if plan.forced:
            return TokenStream(partial(self._forced, plan))
        constraint = None
        # A prefill without an answer needs no grammar.
        if plan.grammar is not None and plan.token_budget:
            constraint = self._grammars.constraint(plan.grammar, plan.token_budget, opened=plan.opened)
        sampler = self.model.sampler(plan.sampling, plan.prompt.token_ids, self.model.shape.device, constraint)
        return TokenStream(partial(self._answer, plan, sampler))

    def kv(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """See `Engine.kv`."""
        self._check()
        return _computed(self, plans)

    def attention(self, plan: Plan, layers: int | None = None) -> Tensor | None:
        """How much the tokens behind the last region of `plan` attend to each token in it.

        The region is composed: the KV of its packs is moved there, and the tokens between them are masked. The result
        is the largest weight of a token behind the region on each of its tokens, `(layers, heads, tokens)`, of the
        first `layers` if given. `None` if a pack has no KV.
        """
        self._check()
        return self.scheduler.twice(partial(self._attention, plan, layers))

    def _attention(self, plan: Plan, layers: int | None) -> Tensor | None:
        region = plan.regions[-1]
        with closing(self.prefill(plan.until(region.start), len(plan.prompt), logits=False)) as run:
            packs, by_layer = run.load(region, plan), list[Tensor]()
            if packs is None:
                return None
            blank = run.write(region, SpliceComposer(), packs)
            ids, places = plan.prompt.token_ids[region.stop :], range(region.stop, len(plan.prompt))
            with self.scheduler.prefill(len(ids)):
                self.model.forward_among(
                    ids,
                    run.buffer,
                    places,
                    unseen=blank,
                    weights=lambda share: by_layer.append(share[..., region.start : region.stop].amax(dim=1)),
                    layers=layers,
                )
            return torch.stack(by_layer).float().cpu()

    def found(self, plan: Plan) -> int:
        """How many tokens of the prompt, from the first on, are in the prefix tree now."""
        path = _match(self.tree, plan)
        path.release()
        return path.tokens

    def pin(self, plan: Plan) -> Node:
        """Keep the prompt of `plan` in the prefix tree until `unpin` is called with the returned object."""
        with closing(self.scheduler.twice(lambda: self.prefill(plan, len(plan.prompt), logits=False))) as run:
            return run.path.pin()

    def unpin(self, pinned: object) -> None:
        """Undo one `pin`."""
        if not isinstance(pinned, Node):
            raise TypeError(f"Got {type(pinned).__name__}; expected what `pin` gave back.")
        self.tree.unpin(pinned)

    def clear_cache(self) -> None:
        """Drop all KV that is neither pinned nor in use, and all idle buffers."""
        self.tree.clear()
        self.pool.clear()

    def seconds_per_token(self) -> float:
        """Approximate seconds to prefill one token, measured by one pass; NaN without room for it."""
        tokens = min(_PACE_TOKENS, self.max_positions)
        with self.pool.turn(Limit()):
            buffer = self.pool.take(tokens, ())
        if buffer is None:
            return math.nan
        try:
            began = time.perf_counter()
            self.forward([0] * tokens, buffer).cpu()  # Waits for an accelerator.
            return (time.perf_counter() - began) / tokens
        finally:
            self.pool.give(buffer)

    def free_memory(self) -> None:
        """Free what no request uses in the memory of the device."""
        self.tree.vacate()
        self.pool.clear()

    def refresh(self) -> None:
        """Start to use the model as it is now. Raises `BusyError` while KV is pinned or in use.

        Plans made before are refused.
        """
        self.clear_cache()
        with self.pool.turn(Limit()):  # A prompt that waits for its turn is then refused.
            if self.pool.used or not self.tree.is_empty:
                raise BusyError(
                    "Answers are under way, or packs are pinned. End them, `unpin` the packs, and refresh then."
                )
            if self._renew is not None:
                self._run_model(self._renew())

    def prefill(
        self,
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
        at `limit`, and `ModelChangedError` if the model is not that of the plan.
        """
        # One prompt at a time, so that a second prompt with the same beginning finds the KV of the first.
        with self.scheduler.coming(), self.pool.turn(limit):
            self._refuse_old(plan)
            tree = self.tree if plan.reuse else PrefixTree(0, has_states=bool(self.model.shape.states))
            begin_run = partial(Run, self, plan, capacity, tree, limit, logits=logits, asks=asks and plan.reuse)
            run, plain_kv = begin_run(), None
            steered_stop = next((region.stop for region in plan.regions if region.parts), 0)
            if plan.below is not None and run.buffer.length < steered_stop:
                # Only plain KV precedes the first steered region. So its plain KV comes from the same sources as that
                # of a plain prompt: the tree, then packs, then a forward pass.
                run.close()
                plain_run = Run(self, plan.below, capacity, tree, limit, logits=False)
                plain_run.fill()
                with closing(plain_run):
                    plain_kv, computed = plain_run.buffer.read(0, steered_stop), plain_run.computed
                run = begin_run()
                run.computed = computed
            run.fill(plain_kv)
            return run

    def _answer(self, plan: Plan, sampler: Callable[[Tensor, int], int], stream: TokenStream) -> Iterator[int]:
        room, asks = len(plan.prompt) + plan.token_budget, plan.token_budget > 0
        try:
            run = self.scheduler.twice(lambda: self.prefill(plan, room, asks=asks, limit=stream.limit))
        except CancelledError:
            stream.finish = "cancelled"
            return
        tokens: list[int] = []
        # Answers whose prompts begin with the same KV are decoded over the same keys.
        run.buffer.note(run.path.held)
        decoding = Decoding(run.buffer)
        try:
            if run.question:
                run.ask(decoding)
                if stream.limit.is_set():
                    stream.finish = "cancelled"
                    return
            _tell(stream, run)
            for remaining in range(plan.token_budget, 0, -1):
                if run.logits is None:
                    raise AssertionError("a prefilled prompt has logits")
                tokens.append(sampler(run.logits, remaining))
                if plan.sampling.gives_logprobs:
                    stream.logprobs.append(_scored(run.logits, tokens[-1], plan.sampling.top_logprobs))
                if tokens[-1] in self._end_tokens:
                    stream.finish = "stop"
                yield tokens[-1]
                if stream.finish == "stop":
                    return
                # The KV of a token is computed when the caller requests the next token.
                if remaining > 1:
                    run.logits = self.scheduler.step(decoding, tokens[-1])
        finally:
            self.scheduler.leave(decoding)
            run.close(tokens)

    def _refuse_old(self, plan: Plan) -> None:
        """Raise `ModelChangedError` if the model changed since `plan` was made, which may have been long ago."""
        self._check()
        if plan.model not in (None, self.identity):
            raise ModelChangedError("The engine was refreshed after this request was planned. Ask again.")

    def _forced(self, plan: Plan, stream: TokenStream) -> Iterator[int]:
        def scored() -> list[float]:
            with closing(self.prefill(plan, len(plan.prompt) + len(plan.forced), limit=stream.limit)) as run:
                _tell(stream, run)
                return self._losses(run, plan.forced)

        try:
            stream.losses = self.scheduler.twice(scored)
        except CancelledError:
            stream.finish = "cancelled"
            return
        yield from plan.forced

    def _losses(self, run: Run, tokens: Sequence[int]) -> list[float]:
        """The negative log-probability of each of `tokens` after `run`."""
        if run.logits is None:
            raise AssertionError("a prefilled prompt has logits")
        logits = run.logits[None]
        if len(tokens) > 1:
            logits = torch.cat([logits, self.forward(tokens[:-1], run.buffer, len(tokens) - 1)])
        expected = torch.tensor(tokens, device=logits.device)
        token_losses = torch.nn.functional.cross_entropy(logits.float(), expected, reduction="none")
        return [float(loss) for loss in token_losses]

    def forward(self, ids: Sequence[int], buffer: KVBuffer, logits: int = 1) -> Tensor:
        """See `Model.forward`; waits for the model."""
        with self.scheduler.prefill(len(ids)):
            return self.model.forward(ids, buffer, logits)


def _tell(stream: TokenStream, run: Run) -> None:
    """Record the cost of the prompt in the stream."""
    stream.computed_tokens, stream.approximate_tokens = run.computed, run.approximate
    stream.first_logits = run.logits
    stream.state_bytes = sum(kv.state_bytes for _, kv in run.path.held)


def _scored(logits: Tensor, token: int, most: int) -> Scores:
    """The log-probability of `token`, and of the `most` likeliest tokens, in float32."""
    logprobs = logits.to(torch.float32).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(most, len(logprobs)))
    return [(token, float(logprobs[token])), *zip(ids.tolist(), values.tolist(), strict=True)]


def _computed(engine: LocalEngine, plans: Iterable[Plan]) -> Iterator[KVTensors]:
    """The KV of `plan.wanted` for each plan, in order. Texts after the same prefix share passes."""
    source = iter(plans)
    while window := list(itertools.islice(source, _WINDOW)):
        # Batches run in the order of their first plans, so that the first results come soon.
        results: dict[int, KVTensors] = {}
        upcoming = 0
        for batch in sorted(_batches(engine, window), key=min):
            together: list[KVTensors] = []
            if len(batch) > 1:  # Without the memory for it, each is computed alone, which needs less.
                together = engine.scheduler.twice(partial(_together, engine, [window[at] for at in batch]), list)
            kvs = together or [engine.scheduler.twice(partial(_alone, engine, window[at])) for at in batch]
            results.update(zip(batch, kvs, strict=True))
            while upcoming in results:
                yield results.pop(upcoming)
                upcoming += 1


def _batches(engine: LocalEngine, plans: list[Plan]) -> list[list[int]]:
    """The indices of the plans, grouped into passes. A pass has texts after the same prefix of plain tokens."""
    batches: list[list[int]] = []
    latest: dict[tuple[int, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        start, stop = plan.wanted
        is_plain = all(region.source == "computed" and region.stop <= start for region in plan.regions)
        batch = latest.get(plan.prompt.token_ids[:start], []) if is_plain and "batch" not in engine.lacks else []
        tokens = sum(plans[member].wanted[1] - start for member in batch)
        if not batch or len(batch) == _MOST_TEXTS or tokens + stop - start > _MOST_TOKENS:
            batch = []
            batches.append(batch)
            if is_plain:
                latest[plan.prompt.token_ids[:start]] = batch
        batch.append(index)
    return batches


def _alone(engine: LocalEngine, plan: Plan) -> KVTensors:
    start, stop = plan.wanted
    with closing(engine.prefill(plan, stop, logits=False)) as run:
        run.compute_apart(stop)
        return run.buffer.read(start, stop)


def _together(engine: LocalEngine, plans: list[Plan]) -> list[KVTensors]:
    """The KV of several plans, computed in one pass; empty when there is no room for that now."""
    start, shape, stops = plans[0].wanted[0], engine.model.shape, [plan.wanted[1] for plan in plans]
    run, reserved = engine.prefill(plans[0], start, logits=False), 0
    try:
        size = sum(KVBuffer.bytes_for(shape, stop) for stop in stops)
        if not engine.pool.reserve(size):
            return []
        reserved = size
        buffers = [KVBuffer(shape, stop) for stop in stops]
        prefix_tokens = min(run.buffer.length, start)
        for buffer in buffers:
            buffer.append(run.buffer.view_of(0, prefix_tokens))
        ids = [plan.prompt.token_ids[prefix_tokens:stop] for plan, stop in zip(plans, stops, strict=True)]
        with engine.scheduler.prefill(sum(map(len, ids))):
            engine.model.ragged(buffers, ids)
        return [buffer.read(start, stop) for buffer, stop in zip(buffers, stops, strict=True)]
    finally:
        engine.pool.free(reserved)
        run.close()


class Run:
    """A plan being executed: a buffer with the KV of its prompt, and how it was obtained. Call `close` at the end.

    It computes only the tokens whose KV is neither in the prefix tree nor in a pack.
    """

    def __init__(  # noqa: PLR0913 - as `LocalEngine.prefill`
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
            path = _match(tree, plan, logits=logits)
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
                self.compute_apart(region.stop)
                kv = self.buffer.read(region.start, region.stop)
                self.buffer.truncate(region.start)
                self._alter(region, kv)
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
            computed = self._pass(ids, int(is_last))
            self.logits = computed[0] if is_last else None
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

    def _pass(self, ids: Sequence[int], logits: int) -> Tensor:
        """As `forward`, but also compute the tokens in `self._late`, which completes their composed region."""
        if self._late is None:
            return self._engine.forward(ids, self.buffer, logits)
        (region, late_places), self._late = self._late, None
        stop = self.buffer.length + len(ids)
        last_logits = self._among([*late_places, *range(self.buffer.length, stop)], logits)
        self.buffer.passed(stop)
        self._insert(region)
        return last_logits

    def _among(self, places: Sequence[int], logits: int = 0) -> Tensor:
        """Compute the tokens of the prompt at `places`, of which some have tokens behind them."""
        ids = [self.plan.prompt.token_ids[at] for at in places]
        with self._engine.scheduler.prefill(len(places)):
            return self._model.forward_among(ids, self.buffer, places, logits=logits)

    def compute_apart(self, until: int) -> None:
        """Compute the tokens up to `until`, which the tree does not get."""
        while (start := self.buffer.length) < until:
            ids = self.plan.prompt.token_ids[start : min(until, start + self._engine.pass_tokens)]
            self._engine.forward(ids, self.buffer, 0)
            self.computed += len(ids)
            self._check_limit()

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


def _match(tree: PrefixTree, plan: Plan, *, logits: bool = True) -> Path:
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
