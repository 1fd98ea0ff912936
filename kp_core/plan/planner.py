"""Makes plans from messages: where the KV of each pack comes from, and which KV the store keeps."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TypeAlias

from kp_core.compose import (
    AutoComposer,
    Composer,
    ExactComposer,
    PacketComposer,
    SelectComposer,
    SpliceComposer,
    laid_out,
)
from kp_core.engines.arranging import Selector, arranged
from kp_core.engines.calibration import Calibrations
from kp_core.errors import ContextOverflowError, KnowledgePackError, OptionError, PackNotFoundError
from kp_core.packs.entry import Entry, KeptKV
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.view import TRUSTED_ROLES, PackRef, PackView, explicit_packs, why_unresolved
from kp_core.plan.engine import Engine, HasCache
from kp_core.plan.plan import Plan, Region, plan_regions, plan_steered
from kp_core.plan.request import CompiledFor, Request
from kp_core.prompt.conversation import Message, Turn, placed, unresolved
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.template import ChatTemplate
from kp_core.steering import as_steering

__all__ = ["Learned", "Planner"]

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 512
_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.
_REMEMBERED = 8192  # Recognised packs and kept parts that are remembered as met.

Learned: TypeAlias = Sequence[tuple[KnowledgePack, Plan]]
"""Recognised packs to compile for their positions: each without KV, and with the plan that computes it."""


class Planner:
    """Makes plans for one model."""

    def __init__(self, engine: Engine, template: ChatTemplate, selector: Selector, calibrations: Calibrations) -> None:
        self._engine, self.model, self._template = engine, engine.identity, template
        self._selector, self.calibrations = selector, calibrations
        self._met, self._lock = dict[Hashable, None](), threading.Lock()

    def plan(
        self,
        messages: Sequence[Message] | str,
        request: Request,
        *,
        tokens: int | None = None,
        learn: bool = True,
    ) -> tuple[Plan, Learned]:
        """The plan of one request, and the packs to compile when the engine is idle.

        The answer may take `tokens` tokens, by default as many as the request allows. Without `learn`, recognised texts
        and kept KV are not counted as met. Raises `PromptError` and its subclasses, `PackNotFoundError`
        (`unresolved="error"`), `FingerprintMismatchError` for packs, steerings and wrappers of another model, and
        `SteeringError`.
        """
        view = request.view
        if view is not None:
            recognise = view.recognise and request.recognise
            view = replace(view, recognise=recognise, model=self.model, mismatch=request.mismatch)
        turns = placed(
            messages,
            view=view,
            packs=explicit_packs(request.packs, view, self.model, request.mismatch),
            placement=request.placement,
            compact=request.compact,
        )
        handles = unresolved(turns)
        _report(handles, view, request)
        turns, request, unread, choice = self._selected(turns, request, view)
        prompt = self._template.render_turns(turns, shape=request.shape, thinking=request.thinking)
        prompt = replace(prompt, unread=unread, unresolved=len(handles))
        plan, learned = self._sourced(prompt, request, view, learn=learn)
        prompt = plan.prompt
        steered = self._steered(prompt, request)
        if isinstance(composer := request.composer, PacketComposer):
            composer.check(self.model)
            wrapped = [span for region in plan.regions if region.composer == composer for span in region.spans]
            if steered or not request.reuse:  # Steered packs are computed; without reuse, everything is.
                request = replace(request, composer=ExactComposer())
                plan, _ = self._sourced(prompt, request, view)
            elif wrapped:
                plan, _ = self._sourced(laid_out(prompt, wrapped, self._template.ends(prompt), composer), request, view)
        budget = self._budget(plan.prompt, request, tokens)
        plan = replace(plan, sampling=request.sampling, token_budget=budget, choice=choice)
        if steered:
            below, _ = self._sourced(prompt.until(steered[0].stop), request, view)
            plan = replace(plan, regions=plan_regions(plan.prompt, steered=steered), below=below)
        plan = replace(plan, kept=self._kept(plan, request, learn=learn))
        return plan, learned

    def _selected(
        self, turns: tuple[Turn, ...], request: Request, view: PackView | None
    ) -> tuple[tuple[Turn, ...], Request, int, str]:
        """What `auto` and `select` make of a request: with the packs to send, how many were left out, and why."""
        unread, why = 0, ""
        if isinstance(request.composer, AutoComposer):
            groups = [[len(pack.pack.token_ids) for pack in group.packs] for group in arranged(turns, {})[1]]
            composer, reason = self.calibrations.choice(groups, request.composer, view)
            request, why = replace(request, composer=composer), f"{composer.key}, because {reason}"
        if isinstance(request.composer, SelectComposer):
            turns, unread = self._selector.selected(turns, request.composer, view)
        return turns, request, unread, why

    def _steered(self, prompt: Prompt, request: Request, *, answering: bool = True) -> tuple[Region, ...]:
        """The steered regions of `prompt`. Checks their steerings against the model and warns of too strong ones."""
        steering = None
        if request.steering is not None:
            steering = as_steering(request.steering, with_knowledge=bool(prompt.spans))
        steered = plan_steered(prompt, steering, request.scope, answering=answering)
        for part_steering in (part.steering for region in steered for part in region.parts):
            if part_steering is not None:
                part_steering.check(self.model)
                part_steering.warn_beyond_cliff()
        return steered

    def pinned(self, pack: KnowledgePack) -> Plan:
        """The plan for `pack` after the prefix that it was compiled for, with nothing after it."""
        start = len(pack.prefix)
        span = Span(start, start + len(pack.token_ids), PackRef("", pack))
        prompt = Prompt(pack.prefix + pack.token_ids, (span,), owner=pack.namespace)
        plan, _ = self._sourced(prompt, Request())
        steered = self._steered(plan.prompt, Request(), answering=False)
        return replace(plan, regions=plan_regions(plan.prompt, steered=steered), below=plan) if steered else plan

    def wanted(
        self, prefix: Prefix, token_ids: Sequence[int], namespace: str = "", before: Sequence[Span] = ()
    ) -> Plan:
        """The plan for the KV of `token_ids` after `prefix`, which contains the packs `before`.

        All other tokens belong to `namespace`, because the last one may contain the beginning of a pack.
        """
        ids = (*prefix, *token_ids)
        prompt, regions = Prompt(ids, as_text=tuple(before), owner=namespace), plan_regions(Prompt(prefix))
        return Plan(prompt, regions, wanted=(len(prefix), len(ids)), model=self.model)

    def _sourced(
        self, prompt: Prompt, request: Request, source: PackView | None = None, *, learn: bool = False
    ) -> tuple[Plan, Learned]:
        """The plan that prefills `prompt` unsteered, and the packs to compile for later requests.

        A recognised pack without KV for its position is computed as text; from the second time on, it is also compiled
        for that position. With a steering, recognised packs are text.
        """
        packs, composed, learned = set[Span](), dict[Span, Composer](), list[tuple[KnowledgePack, Plan]]()
        spans, text_spans = list[Span](), list[Span]()
        composable = set(request.composer.regions(prompt))
        for span in prompt.spans:
            pack = span.pack
            is_home = pack.prefix == prompt.token_ids[: span.start]
            fits = pack.token_ids == prompt.token_ids[span.start : span.stop]
            is_exact = is_home and fits and pack.fingerprint == self.model
            if span.recognised:
                is_plain = pack.steering is None and request.steering is None
                is_read = is_exact and (pack.kv is not None or pack.stored_bytes > 0)
                read = span if is_read else self._stored(span, prompt, source) if is_plain else None
                if is_plain and read:
                    packs.add(read)
                    spans.append(read)
                elif is_plain and self._was_met((span.handle, hash(prompt.token_ids[: span.start])), learn=learn):
                    spans.append(span)
                    learned.append(self._compiled(span, prompt))
                else:
                    text_spans.append(span)
                continue
            if is_exact:
                packs.add(span)
            elif composer := self._composer(span, prompt, request, composable, is_home=is_home):
                composed[span] = composer
            elif is_home and pack.fingerprint == ModelFingerprint.unknown() and pack.text:
                # The store has only KV that another engine computed, so this engine compiles the pack too.
                learned.append(self._compiled(span, prompt))
            elif stored := self._stored(span, prompt, source):
                span = stored  # noqa: PLW2901 - the same place, and KV that was computed for it
                packs.add(span)
            spans.append(span)
        prompt = replace(prompt, spans=tuple(spans), as_text=(*prompt.as_text, *text_spans))
        regions = plan_regions(prompt, packs, composed)
        return Plan(prompt, regions, packs=source, reuse=request.reuse, model=self.model), learned

    def _composer(
        self, span: Span, prompt: Prompt, request: Request, composable: Collection[Span], *, is_home: bool
    ) -> Composer | None:
        """What makes the KV of a pack that is not exact at its place; `None` if it is computed or read."""
        pack = span.pack
        if pack.token_ids != prompt.token_ids[span.start : span.stop]:
            return None
        is_edit = pack.fingerprint.is_edit_of(self.model)
        if is_home:
            return SpliceComposer() if is_edit else None  # Only the text that was overwritten is what it stands for.
        return request.composer if span in composable and (is_edit or pack.fingerprint == self.model) else None

    def _compiled(self, span: Span, prompt: Prompt) -> tuple[KnowledgePack, Plan]:
        """The pack of `span` as compiled for its position, without KV, and the plan that computes its KV."""
        ids, prefix = prompt.token_ids[span.start : span.stop], prompt.token_ids[: span.start]
        pack = replace(span.pack, token_ids=ids, prefix=prefix, fingerprint=self.model, kv=None)
        before = [earlier for earlier in (*prompt.spans, *prompt.as_text) if earlier.start < span.start]
        return pack, self.wanted(prefix, ids, pack.namespace, before)

    def _stored(self, span: Span, prompt: Prompt, source: PackView | None) -> Span | None:
        """The span with the stored entry of its pack for exactly the tokens before it, if `source` has one."""
        pack, key = span.pack, PackKey(self.model, prompt.token_ids[: span.start])
        if source is None or pack.steering is not None or not find_handles(span.handle):
            return None
        if pack.fingerprint != self.model or pack.prefix == key.prefix:
            return None
        entry = source.peek(Handle.parse(span.handle), key)
        if entry is None or not key.fits(entry) or not entry.stored_bytes:
            return None
        if entry.token_ids != prompt.token_ids[span.start : span.stop]:
            return None
        return replace(span, reference=replace(span.reference, pack=entry))

    def cached_tokens(self, plan: Plan) -> int:
        """How many tokens of a prompt, from the first on, are in memory."""
        return self._engine.cached_tokens(plan) if isinstance(self._engine, HasCache) and plan.reuse else 0

    def _budget(self, prompt: Prompt, request: Request, tokens: int | None) -> int:
        """How many tokens the answer may take. Raises `ContextOverflowError` if they do not fit after the prompt."""
        room = self._engine.max_positions - len(prompt)
        budget = tokens if tokens is not None else request.max_tokens or min(_DEFAULT_MAX_TOKENS, max(room, 1))
        if budget > room:
            raise ContextOverflowError(len(prompt), budget, self._engine.max_positions)
        return budget

    def _was_met(self, key: Hashable, *, learn: bool = True) -> bool:
        """Whether `key` was met before. With `learn`, it is met now."""
        with self._lock:
            was_met = key in self._met
            if learn and not was_met:
                if len(self._met) >= _REMEMBERED:
                    del self._met[next(iter(self._met))]
                self._met[key] = None
            return was_met

    def _kept(self, plan: Plan, request: Request, *, learn: bool) -> KeptKV | None:
        """The kept KV for `plan`; with `learn`, also the parts that this request must keep. `None` if none can be kept.

        Raises `OptionError` for a `keep_in` that the view may not read.
        """
        view = request.view
        if view is None:
            return None
        if request.keep_in is not None and request.keep_in not in view.namespaces:
            raise OptionError(f"Got keep_in={request.keep_in!r}; expected one of the view: {sorted(view.namespaces)}.")
        if not plan.reuse or plan.below is not None or request.keep == "never" or not view.source.keeps:
            return None
        kept = KeptKV(
            view.source,
            frozenset(view.namespaces),
            dict(self._kept_keys(plan, request, view)),
            request.keep == "always",
        )
        if learn:
            missing = [part for part in kept.keys if not kept.has(*part)]
            # KV in memory was met, too, if only as text: a document goes as text until its pack is compiled.
            in_memory = self.cached_tokens(plan) if missing else 0
            kept.wanted = frozenset(
                (start, stop)
                for start, stop in missing
                if request.keep == "always" or self._was_met(kept.keys[start, stop]) or stop <= in_memory
            )
        # A wrapped pack is compiled once and kept then, under every policy except `never`.
        kept.keys |= self._wrapped_keys(plan)
        return kept if kept.keys else None

    def _kept_keys(self, plan: Plan, request: Request, view: PackView) -> Iterator[tuple[tuple[int, int], Entry]]:
        """The key of each pack that is not read from its own entry, by its part of the prompt.

        A short text between two packs belongs to the part of the second one.
        """
        prompt, namespace = plan.prompt, request.keep_in
        if namespace is None and len(view.namespaces) == 1:
            namespace = next(iter(view.namespaces))
        # KV behind words of the conversation is kept in `namespace`, or not at all.
        hasher, behind_words, digested = blake2b(digest_size=16), self._behind_words(prompt), 0
        handles: list[str] = []
        for region in plan.regions:
            span = region.span if region.source == "pack" else None
            # A pack whose KV is not stored is computed each time by choice, so only `keep="always"` keeps it.
            has_entry = span is not None and bool(span.pack.kv or span.pack.stored_bytes or request.keep != "always")
            last_stop = region.start
            for pack_span in prompt.spans:
                if not region.start <= pack_span.start < region.stop:
                    continue
                if find_handles(pack_span.handle) and pack_span.handle not in handles:
                    handles.append(pack_span.handle)
                start = (
                    last_stop
                    if handles and digested and pack_span.start - last_stop <= _GAP_TOKENS
                    else pack_span.start
                )
                hasher.update(_packed(prompt.token_ids[digested:start]))
                digested, last_stop = start, pack_span.stop
                if handles and not region.label and not has_entry and (namespace or not behind_words[pack_span]):
                    ids, words = prompt.token_ids[start : pack_span.stop], behind_words[pack_span]
                    owners = frozenset((*handles, namespace) if namespace and words else handles)
                    entry = Entry(self.model, start, hasher.hexdigest(), ids, owners, begins=_BEGINS)
                    # Behind the template alone it is the entry that the pack is compiled to.
                    is_own = entry.owners == {pack_span.handle} and start == pack_span.start
                    yield (start, pack_span.stop), replace(entry, begins=0) if is_own else entry
            if region.label:
                hasher.update(_packed(prompt.token_ids[digested : region.stop]) + f"{region.label}\n".encode())
                digested = region.stop

    def _wrapped_keys(self, plan: Plan) -> dict[tuple[int, int], Entry]:
        """The key of each wrapped pack that has a handle. The key of the composer names the wrapper."""
        keys = {}
        for region in plan.regions:
            for span in region.spans if isinstance(region.composer, PacketComposer) else ():
                if region.composer and find_handles(span.handle):
                    pack, composer = span.pack, region.composer.key
                    entry = Entry.of_pack(span.handle, self.model, pack.prefix, pack.token_ids, composer)
                    keys[span.start, span.stop] = entry
        return keys

    def _behind_words(self, prompt: Prompt) -> dict[Span, bool]:
        """For each pack, whether words precede it: other text than that of the template, packs and white space."""
        by_span, has_words = dict[Span, bool](), False
        for at, span in enumerate(prompt.spans):
            if at:
                has_words = has_words or bool(prompt.rendered[prompt.spans[at - 1].chars[1] : span.chars[0]].strip())
            else:
                # The template wrote these tokens, or they are the prefix that a pack here was compiled for.
                prefixes = (*self._heads, *(other.pack.prefix for other in prompt.spans))
                known = (len(prefix) for prefix in prefixes if prompt.token_ids[: len(prefix)] == prefix)
                has_words = max(known, default=0) < span.start
            # A pack without a handle is not in the store, so its text counts as words.
            has_words = has_words or not find_handles(span.handle)
            by_span[span] = has_words
        return by_span

    @cached_property
    def _heads(self) -> list[tuple[int, ...]]:
        """The tokens before the first pack of a user message, and of the system message."""
        heads = []
        roles: tuple[CompiledFor, ...] = ("user", "system")
        for role in roles:
            with suppress(KnowledgePackError):  # Not every template has a system message.
                heads.append(self._template.prefix(role))
        return heads


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


def _report(handles: Sequence[tuple[str, str]], view: PackView | None, request: Request) -> None:
    """Raise or log, as the request wants it, that `handles`, each with the role that named it, bring no pack."""
    trusted = TRUSTED_ROLES if view is None else view.trusted_roles
    for name, role in handles:
        reason = why_unresolved(name, view, role)
        if request.unresolved == "error" and role in trusted:
            raise PackNotFoundError(f'{name} does not resolve: {reason}. `unresolved="warn"` sends it as text.')
        if request.unresolved != "text":
            _warn_once(name, reason)


@lru_cache(8192)
def _warn_once(name: str, reason: str) -> None:
    logger.warning("Handle %s stays text: %s.", name, reason)
