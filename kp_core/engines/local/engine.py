"""The engine for one machine: serves plans with a local model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kp_core.engines.local.buffer import KVBuffer, default_cache_bytes, memory_bytes
from kp_core.engines.local.grammar import Grammars
from kp_core.engines.local.model import Model
from kp_core.engines.local.run import Run, match
from kp_core.engines.local.scheduler import Decoding, Scheduler
from kp_core.engines.local.tree import PrefixTree
from kp_core.errors import ModelError
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import find_handles
from kp_core.packs.pack import common_length
from kp_core.packs.view import PackView
from kp_core.plan.engine import CAPABILITIES, TokenStream
from kp_core.plan.plan import Limit, Plan
from kp_core.threads import check_process, make_anew
from kp_core.tools import Scores

_MOST_TEXTS, _MOST_TOKENS = 16, 512  # Of one pass.
_NEVER = Limit()


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
        pass_tokens: int | None = None,
        cache_bytes: int | None = None,
        host_cache_bytes: int | None = None,
        renew: Callable[[], Model] | None = None,
    ) -> None:
        self.tokenizer, self._identity, self._check, self._renew = tokenizer, identity, check, renew
        device = model.shape.device
        # On a GPU, a short pass takes as long as a longer one.
        self._pass_tokens = pass_tokens or (8192 if device.type == "cuda" else 1024)
        self._cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        if host_cache_bytes is None:
            # Pinned memory comes in powers of two, so this is up to a quarter of the memory.
            host_cache_bytes = memory_bytes(torch.device("cpu")) // 8 if device.type == "cuda" else 0
        self._host_cache_bytes = 0 if model.shape.devices else host_cache_bytes
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
        has_states = bool(model.shape.states)
        self.tree = PrefixTree(self._cache_bytes, has_states=has_states, host_bytes=self._host_cache_bytes)
        """The KV that prompts with the same beginning share."""
        self.pool = model.pool(self.tree, self._cache_bytes)
        """The buffers of requests."""
        self.scheduler = Scheduler(model, self._pass_tokens, self.free_memory)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        self._end_tokens = frozenset(model.end_tokens | ({eos} if isinstance(eos, int) else set()))
        self._grammars = Grammars(self.tokenizer, model.vocabulary, self._end_tokens)
        self._removals = dict[tuple[str, str], object]()  # Of each store and namespace, as last seen.

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

        Raises `PromptError` for a grammar that cannot be compiled, `OptionError` when no answer of the grammar fits
        into the token budget, and `ModelError` for a request larger than `cache_bytes`.
        """
        self._check()
        self.pool.check(len(plan.prompt) + plan.token_budget)
        constraint = None
        # A prefill without an answer needs no grammar.
        if plan.grammar is not None and plan.token_budget:
            constraint = self._grammars.constraint(plan.grammar, plan.token_budget, opened=plan.opened)
        sampler = self.model.sampler(plan.sampling, plan.prompt.token_ids, self.model.shape.device, constraint)
        return TokenStream(partial(self._answer, plan, sampler))

    def kv(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """See `Engine.kv`."""
        self._check()
        return self._computed(plans)

    def attention(self, plan: Plan, layers: int | None = None) -> Tensor | None:
        """See `Attends.attention`. The composer writes the KV of the region; tokens between its packs are masked."""
        self._check()
        return self.scheduler.retry_after_oom(partial(self._attention, plan, layers))

    def branch(
        self,
        plans: Sequence[Plan],
        stream: TokenStream,
        tokens: Sequence[Collection[int]],  # noqa: ARG002 - all are given
    ) -> Generator[Tensor]:
        """See `Branches.branch`: what all prompts begin with is computed once, and their ends in few passes."""
        self._check()
        for plan in plans:
            self.pool.check(len(plan.prompt))
        if common := self._common(plans):
            yield from self._ends(plans[0].until(common), [plan.prompt.token_ids[common:] for plan in plans], stream)
            return
        for plan in plans:
            prefill = partial(self.prefill, plan, len(plan.prompt), limit=stream.limit)
            with closing(self.scheduler.retry_after_oom(prefill)) as run:
                _tell(stream, run, stream.computed_tokens)
                if run.logits is None:
                    raise AssertionError("a prefilled prompt has logits")
                yield run.logits

    def _common(self, plans: Sequence[Plan]) -> int:
        """How many tokens the prompts have in common, if there is only plain text behind; else 0."""
        ids = [plan.prompt.token_ids for plan in plans]
        common = min(*(common_length(ids[0], other) for other in ids), min(map(len, ids)) - 1)
        longest = max(map(len, ids)) - common
        parts = {
            tuple((part.start, part.source, part.composer, part.label) for part in plan.regions if part.start < common)
            for plan in plans
        }
        is_plain = all(part.source == "computed" for plan in plans for part in plan.regions if part.stop > common)
        may_batch = len(plans) > 1 and "batch" not in self.lacks and longest <= _MOST_TOKENS
        return common if may_batch and is_plain and len(parts) == 1 else 0

    def _ends(self, plan: Plan, ends: Sequence[Sequence[int]], stream: TokenStream) -> Iterator[Tensor]:
        """The logits behind each of `ends`, which follow the prompt of `plan`."""
        common, longest = len(plan.prompt), len(plan.prompt) + max(map(len, ends))
        prefill = partial(self.prefill, plan, longest, logits=False, limit=stream.limit)
        with closing(self.scheduler.retry_after_oom(prefill)) as run:
            _tell(stream, run)
            waiting = list(ends)
            while waiting:
                lengths = accumulate(map(len, waiting), max)  # Attention pads the rows of a pass to the longest.
                count = max(sum(rows * length <= _MOST_TOKENS for rows, length in enumerate(lengths, 1)), 1)
                rows, waiting = waiting[:count], waiting[count:]
                if stream.limit.is_set():
                    raise CancelledError
                yield from self.scheduler.retry_after_oom(partial(self._pass, run.buffer, rows))
                stream.computed_tokens += sum(map(len, rows))
                run.buffer.truncate(common)

    def _pass(self, buffer: KVBuffer, rows: Sequence[Sequence[int]]) -> Tensor:
        """The logits behind each of `rows`, computed in one pass, each behind the tokens in `buffer`."""
        with self.scheduler.prefill(sum(map(len, rows))):
            return self.model.ragged([buffer] * len(rows), rows)

    def _attention(self, plan: Plan, layers: int | None) -> Tensor | None:
        region = plan.regions[-1]
        with closing(self.prefill(plan.until(region.start), len(plan.prompt), logits=False)) as run:
            packs, by_layer = run.load(region, plan), list[Tensor]()
            if packs is None or region.composer is None:
                return None
            blank = run.write(region, region.composer, packs)
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

    def cached_tokens(self, plan: Plan) -> int:
        """How many tokens of the prompt, from the first on, are in the prefix tree now."""
        path = match(self.tree, plan)
        path.release()
        return path.tokens

    def clear_cache(self) -> None:
        """Drop all KV that is not in use, and all idle buffers."""
        self.tree.clear()
        self.pool.clear()

    def free_memory(self) -> None:
        """Free what no request uses in the memory of the device."""
        self.tree.vacate()
        self.pool.clear()

    def refresh(self) -> None:
        """Start to use the model as it is now. Raises `ModelError` while KV is in use.

        Plans made before are refused.
        """
        self.clear_cache()
        with self.pool.turn(Limit()):  # A prompt that waits for its turn is then refused.
            if self.pool.used or not self.tree.is_empty:
                raise ModelError("Answers are under way. End them, and refresh then.")
            if self._renew is not None:
                self._run_model(self._renew())

    def prefill(
        self, plan: Plan, capacity: int, *, logits: bool = True, defers: bool = False, limit: Limit = _NEVER
    ) -> Run:
        """Prefill the prompt of `plan` into a buffer for `capacity` tokens; `logits` and `defers` are those of `Run`.

        Waits until the buffer fits into the budget. Raises `ModelError` if it can never fit or the model is not that of
        the plan, and `CancelledError` at `limit`.
        """
        # One prompt at a time, so that a second prompt with the same beginning finds the KV of the first.
        with self.scheduler.coming(), self.pool.turn(limit):
            self._check()
            if plan.model not in (None, self.identity):  # The plan may have been made long ago.
                raise ModelError("The engine was refreshed after this request was planned. Ask again.")
            if plan.packs is not None:
                self._forget_removed(plan.packs)
            tree = self.tree if plan.reuse else PrefixTree(0, has_states=bool(self.model.shape.states))
            new_run = partial(Run, self.scheduler, self.pool, tree, capacity=capacity, limit=limit)
            begin_run = partial(new_run, plan, logits=logits, defers=defers and plan.reuse)
            run, plain_kv = begin_run(), None
            steered_stop = next((region.stop for region in plan.regions if region.parts), 0)
            if plan.unsteered is not None and run.buffer.length < steered_stop:
                # Only plain KV precedes the first steered region. So its plain KV comes from the same sources as that
                # of a plain prompt: the tree, then packs, then a forward pass.
                run.close()
                plain_run = new_run(plan.unsteered, logits=False)
                plain_run.fill()
                with closing(plain_run):
                    plain_kv, computed = plain_run.buffer.read(0, steered_stop), plain_run.computed
                run = begin_run()
                run.computed = computed
            run.fill(plain_kv)
            return run

    def _answer(self, plan: Plan, sampler: Callable[[Tensor, int], int], stream: TokenStream) -> Iterator[int]:
        room, defers = len(plan.prompt) + plan.token_budget, plan.token_budget > 0
        try:
            run = self.scheduler.retry_after_oom(lambda: self.prefill(plan, room, defers=defers, limit=stream.limit))
        except CancelledError:
            stream.finish = "cancelled"
            return
        tokens: list[int] = []
        # Answers whose prompts begin with the same KV are decoded over the same keys.
        run.buffer.note(run.path.held)
        decoding = Decoding(run.buffer)
        try:
            if run.deferred_suffix:
                run.decode_suffix(decoding)
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
                    run.settle()
                    run.logits = self.scheduler.step(decoding, tokens[-1])
        finally:
            self.scheduler.leave(decoding)
            run.close(tokens)

    def _forget_removed(self, view: PackView) -> None:
        """Drop the KV of packs that were removed since the last request of their namespace was planned."""
        for namespace, token in view.removals.items():
            seen = repr(view.source), namespace
            if self._removals.setdefault(seen, token) != token:
                handles = (handle for *_, handle in find_handles(" ".join(self.tree.packs)))
                gone = {str(each) for each in handles if each.namespace == namespace and each not in view.source}
                self.pool.clear()  # Idle buffers may hold it, too.
                if self.tree.forget(gone):
                    self._removals[seen] = token

    def _computed(self, plans: Iterable[Plan]) -> Iterator[KVTensors]:
        """The KV of `plan.wanted` for each plan, in order. Texts after the same prefix share passes."""
        for batch in self._batches(plans):
            together: list[KVTensors] = []
            if len(batch) > 1:  # Without the memory for it, each is computed alone, which needs less.
                together = self.scheduler.retry_after_oom(partial(self._together, batch), list)
            yield from together or (self.scheduler.retry_after_oom(partial(self._alone, plan)) for plan in batch)

    def _batches(self, plans: Iterable[Plan]) -> Iterator[list[Plan]]:
        """The plans, grouped into passes. A pass has texts after the same prefix of plain tokens."""
        batch, tokens, prefix = list[Plan](), 0, tuple[int, ...]()
        for plan in plans:
            start, stop = plan.wanted
            tokens += stop - start
            is_plain = all(region.source == "computed" and region.stop <= start for region in plan.regions)
            is_alike = is_plain and "batch" not in self.lacks and plan.prompt.token_ids[:start] == prefix
            if batch and not (is_alike and len(batch) < _MOST_TEXTS and tokens <= _MOST_TOKENS):
                yield batch
                batch, tokens = [], stop - start
            if not batch:
                prefix = plan.prompt.token_ids[:start] if is_plain else (-1,)
            batch.append(plan)
        if batch:
            yield batch

    def _alone(self, plan: Plan) -> KVTensors:
        start, stop = plan.wanted
        with closing(self.prefill(plan, stop, logits=False)) as run:
            run.compute(stop, apart=True)
            return run.buffer.read(start, stop)

    def _together(self, plans: list[Plan]) -> list[KVTensors]:
        """The KV of several plans, computed in one pass; empty when there is no room for that now."""
        start, shape, stops = plans[0].wanted[0], self.model.shape, [plan.wanted[1] for plan in plans]
        run, reserved = self.prefill(plans[0].until(start), start, logits=False), 0
        try:
            size = sum(KVBuffer.bytes_for(shape, stop) for stop in stops)
            if not self.pool.reserve(size):
                return []
            reserved = size
            buffers = [KVBuffer(shape, stop) for stop in stops]
            for buffer in buffers:
                buffer.append(run.buffer.view_of(0, start))
            ids = [plan.prompt.token_ids[slice(*plan.wanted)] for plan in plans]
            with self.scheduler.prefill(sum(map(len, ids))):
                self.model.ragged(buffers, ids)
            return [buffer.read(start, stop) for buffer, stop in zip(buffers, stops, strict=True)]
        finally:
            self.pool.free(reserved)
            run.close()


def _tell(stream: TokenStream, run: Run, computed: int = 0) -> None:
    """Record the cost of the prompt in the stream, behind `computed` tokens of others."""
    stream.computed_tokens, stream.approximate_tokens = computed + run.computed, run.approximate
    stream.found_tokens = run.found
    stream.first_logits, stream.kept = run.logits, run.kept


def _scored(logits: Tensor, token: int, most: int) -> Scores:
    """The log-probability of `token`, and of the `most` likeliest tokens, in float32."""
    logprobs = logits.to(torch.float32).log_softmax(dim=-1)
    values, ids = logprobs.topk(min(most, len(logprobs)))
    return [(token, float(logprobs[token])), *zip(ids.tolist(), values.tolist(), strict=True)]
