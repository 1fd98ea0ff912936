"""Makes plans from messages: where the KV of each pack comes from, and which KV the store keeps."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TypeAlias

from kp_core.errors import ContextOverflowError, KnowledgePackError, OptionError, PackNotFoundError
from kp_core.packs.entry import Entry, KeptKV
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.view import TRUSTED_ROLES, PackRef, PackView, explicit_packs, why_unresolved
from kp_core.plan.composer import Composer, Host
from kp_core.plan.engine import HasCache
from kp_core.plan.plan import Plan, plan_regions, plan_steered
from kp_core.plan.region import Region
from kp_core.plan.request import CompiledFor, Request
from kp_core.prompt.conversation import Message, placed, unresolved
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import as_steering

__all__ = ["Learned", "Planner"]

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 512
_GAP_TOKENS = 64  # Most tokens between two packs that are kept together with the second one.
_BEGINS = 8  # First tokens of a part that belong to its key.
_REMEMBERED = 8192  # Recognised packs and kept parts that are remembered as met.

Learned: TypeAlias = Sequence[tuple[KnowledgePack, Plan]]
"""Recognised packs to compile for their positions: each without KV, and with the plan that computes it."""


class _Overwritten(Composer):
    """Leaves packs whose KV was overwritten as they are, at the places that they were compiled for."""

    key = "overwritten"

    def caution(self, host: Host) -> str:  # noqa: ARG002
        """Empty: whoever overwrote a pack was told."""
        return ""


_OVERWRITTEN = _Overwritten()


@dataclass(frozen=True)
class _Sources:
    """Where the KV of the packs in `prompt` comes from: their `own`, or a composer. The others are computed."""

    prompt: Prompt
    own: Collection[Span]
    composed: Mapping[Span, Composer]
    learned: Learned


class Planner:
    """Makes plans for one model."""

    def __init__(self, host: Host) -> None:
        self.host, self.model = host, host.model
        self._engine, self._template = host.engine, host.template
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
        (`unresolved="error"`), `PackError` for packs, steerings and soft tokens of another model, and
        `OptionError`.
        """
        view = request.view
        if view is not None:
            recognise = view.recognise and request.recognise
            view = replace(view, recognise=recognise, model=self.model, mismatch=request.mismatch)
        host = replace(self.host, view=view)
        turns = placed(
            messages,
            view=view,
            packs=explicit_packs(request.packs, view, self.model, request.mismatch),
            placement=request.placement,
            compact=request.compact,
        )
        handles = unresolved(turns)
        _report(handles, view, request)
        arranged = request.composer.arrange(turns, host)
        prompt = self._template.render_turns(arranged.turns, shape=request.shape, thinking=request.thinking)
        prompt = replace(prompt, unread=arranged.unread, unresolved=len(handles))
        prompt, composed = self._laid_out(prompt, arranged.composer, request, host)
        sources = self._sources(prompt, composed, view, plain=request.steering is None, learn=learn)
        plan = _cut(sources, self._steered(sources.prompt, request), view, self.model, reuse=request.reuse)
        budget = self._budget(plan.prompt, request, tokens)
        plan = replace(plan, sampling=request.sampling, token_budget=budget, choice=arranged.choice)
        return replace(plan, kept=self._kept(plan, request, learn=learn)), sources.learned

    def _laid_out(
        self, prompt: Prompt, composer: Composer, request: Request, host: Host
    ) -> tuple[Prompt, Mapping[Span, Composer]]:
        """`prompt` as `composer` lays it out, and the packs that it composes."""
        if not request.reuse:  # Everything is computed.
            return prompt, {}
        moved = [span for span in prompt.spans if not span.recognised and self._is_moved(span, prompt)]
        laid_out, spans = composer.layout(prompt, moved, host)
        is_steered = request.steering is not None or any(span.pack.steering is not None for span in prompt.spans)
        if is_steered and laid_out is not prompt:  # Steered packs are computed, and nothing stands around them.
            return prompt, {}
        return laid_out, dict.fromkeys(spans, composer)

    def _is_moved(self, span: Span, prompt: Prompt) -> bool:
        """Whether the KV of a pack is of this model and of its tokens in `prompt`, but of another place."""
        pack = span.pack
        is_home, fits = _stands(span, prompt)
        return fits and not is_home and (pack.fingerprint == self.model or pack.fingerprint.is_edit_of(self.model))

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
        sources = self._sources(prompt, {})
        return _cut(sources, self._steered(prompt, Request(), answering=False), None, self.model)

    def wanted(
        self, prefix: Prefix, token_ids: Sequence[int], namespace: str = "", before: Sequence[Span] = ()
    ) -> Plan:
        """The plan for the KV of `token_ids` after `prefix`, which contains the packs `before`.

        All other tokens belong to `namespace`, because the last one may contain the beginning of a pack.
        """
        ids = (*prefix, *token_ids)
        prompt, regions = Prompt(ids, as_text=tuple(before), owner=namespace), plan_regions(Prompt(prefix))
        return Plan(prompt, regions, wanted=(len(prefix), len(ids)), model=self.model)

    def _sources(
        self,
        prompt: Prompt,
        composed: Mapping[Span, Composer],
        view: PackView | None = None,
        *,
        plain: bool = True,
        learn: bool = False,
    ) -> _Sources:
        """Where the KV of each pack comes from that is not `composed`.

        A recognised pack without KV for its position is computed as text; from the second time on, it is also compiled
        for that position. Unless the request is `plain`, recognised packs are text.
        """
        own, composed, learned = set[Span](), dict(composed), list[tuple[KnowledgePack, Plan]]()
        spans, texts = list[Span](), list[Span]()
        for span in prompt.spans:
            pack, (is_home, fits) = span.pack, _stands(span, prompt)
            is_exact = is_home and fits and pack.fingerprint == self.model
            if span.recognised:
                is_plain = plain and pack.steering is None
                is_read = is_exact and (pack.kv is not None or pack.stored_bytes > 0)
                read = None if not is_plain else span if is_read else self._stored(span, prompt, view)
                if read:
                    own.add(read)
                    spans.append(read)
                elif is_plain and self._was_met((span.handle, hash(prompt.token_ids[: span.start])), learn=learn):
                    spans.append(span)
                    learned.append(self._compiled(span, prompt))
                else:
                    texts.append(span)
                continue
            if is_exact:
                own.add(span)
            elif is_home and fits and pack.fingerprint.is_edit_of(self.model):
                composed[span] = _OVERWRITTEN  # Only the text that was overwritten is what it stands for.
            elif is_home and pack.fingerprint == ModelFingerprint.unknown() and pack.text:
                # The store has only KV that another engine computed, so this engine compiles the pack too.
                learned.append(self._compiled(span, prompt))
            elif span not in composed and (stored := self._stored(span, prompt, view)):
                span = stored  # noqa: PLW2901 - the same place, and KV that was computed for it
                own.add(span)
            spans.append(span)
        prompt = replace(prompt, spans=tuple(spans), as_text=(*prompt.as_text, *texts))
        return _Sources(prompt, own, composed, learned)

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
        if not plan.reuse or plan.unsteered is not None or request.keep == "never" or not view.source.keeps:
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
        # A pack between soft tokens is compiled once and kept then, under every policy except `never`.
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
        """The key of each pack between soft tokens that has a handle."""
        return {
            (span.start, span.stop): Entry.of_pack(
                *(span.handle, self.model, span.pack.prefix, span.pack.token_ids, span.soft.id)
            )
            for span in plan.prompt.spans
            if span.soft and find_handles(span.handle)
        }

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


def _stands(span: Span, prompt: Prompt) -> tuple[bool, bool]:
    """Whether a pack stands behind the prefix that it was compiled for, and whether the prompt has its tokens."""
    pack = span.pack
    return pack.prefix == prompt.token_ids[: span.start], pack.token_ids == prompt.token_ids[span.start : span.stop]


def _cut(
    sources: _Sources,
    steered: tuple[Region, ...],
    view: PackView | None,
    model: ModelFingerprint,
    *,
    reuse: bool = True,
) -> Plan:
    """The plan that fills a prompt from its sources, with the `steered` regions altered."""
    prompt, unsteered = sources.prompt, None
    if steered:
        begun = prompt.until(steered[0].stop)
        regions = plan_regions(begun, sources.own, sources.composed)
        unsteered = Plan(begun, regions, packs=view, reuse=reuse, model=model)
    regions = plan_regions(prompt, sources.own, sources.composed, steered)
    return Plan(prompt, regions, packs=view, unsteered=unsteered, reuse=reuse, model=model)


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
