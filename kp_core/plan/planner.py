"""Makes plans from messages: where the KV of each pack comes from, and which KV the store keeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from kp_core.errors import ContextOverflowError, KnowledgePackError, OptionError, PackNotFoundError
from kp_core.events import warn_once
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.view import TRUSTED_ROLES, PackView, explicit_packs, why_unresolved
from kp_core.plan.composer import Composer, Host
from kp_core.plan.engine import HasCache
from kp_core.plan.entries import entries_along
from kp_core.plan.plan import Plan, Region, plan_regions, plan_steered
from kp_core.plan.request import CompiledFor, Request
from kp_core.prompt.conversation import Message, Turn, placed, unresolved
from kp_core.prompt.prompt import Prompt, Span
from kp_core.steering import as_steering

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 512
_REMEMBERED = 8192  # Kept parts that are remembered as met.

Learned: TypeAlias = Sequence[tuple[KnowledgePack, Plan]]
"""Packs to compile for their positions: each without KV, and with the plan that computes it."""
Sources: TypeAlias = Mapping[Span, Composer | None]
"""Packs that are not computed: by their composer, or by their own KV."""


class _Overwritten(Composer):
    """Leaves packs whose KV was overwritten as they are, at the places that they were compiled for."""

    key = "overwritten"

    def caution(self, host: Host) -> str:  # noqa: ARG002
        """Empty: whoever overwrote a pack was told."""
        return ""


_OVERWRITTEN = _Overwritten()


class Planner:
    """Makes plans for one model."""

    def __init__(self, host: Host) -> None:
        self.host, self.model = host, host.model
        self._engine, self._template = host.engine, host.template
        self._met, self._lock = dict[Hashable, None](), threading.Lock()

    def plan(
        self, messages: Sequence[Message] | str, request: Request, tokens: int | None = None
    ) -> tuple[Plan, Learned, Sequence[Hashable]]:
        """The plan of one request, the packs to compile when the engine is idle, and what it met (`note`).

        The answer may take `tokens` tokens, by default as many as the request allows. Raises `PromptError` and its
        subclasses, `PackNotFoundError` (`unresolved="error"`), `PackError` for packs, steerings and soft tokens of
        another model, and `OptionError`.
        """
        view = request.view
        if view is not None:
            removals = dict[str, object]()
            with suppress(OSError):  # Only what packs the prompt needs must be in reach.
                removals |= {namespace: view.source.removals(namespace) for namespace in view.namespaces}
            view = replace(view, model=self.model, mismatch=request.mismatch, removals=removals)
        answer = tokens if tokens is not None else request.max_tokens or 1

        def rendered(turns: Sequence[Turn]) -> Prompt:
            return self._template.render_turns(turns, shape=request.shape, thinking=request.thinking)

        host = replace(
            self.host, view=view, excess=lambda turns: len(rendered(turns)) + answer - self._engine.max_positions
        )
        turns = placed(
            messages,
            view=view,
            packs=explicit_packs(request.packs, view, self.model, request.mismatch),
            placement=request.placement,
        )
        handles = unresolved(turns)
        _report(handles, view, request)
        arranged = request.composer.arrange(turns, host)
        prompt = replace(rendered(arranged.turns), unread=arranged.unread, unresolved=len(handles))
        prompt, composed = self._laid_out(prompt, arranged.composer, request, host)
        prompt, sources, learned = self._sources(prompt, composed, view)
        steered, room = self._steered(prompt, request), self._engine.max_positions - len(prompt)
        budget = tokens if tokens is not None else request.max_tokens or min(_DEFAULT_MAX_TOKENS, max(room, 1))
        if budget > room:
            raise ContextOverflowError(len(prompt), budget, self._engine.max_positions)
        plan = Plan(
            prompt,
            plan_regions(prompt, sources, steered),
            request.sampling,
            budget,
            packs=view,
            reuse=request.reuse,
            model=self.model,
            choice=arranged.choice,
        )
        if steered:
            begun = prompt.until(steered[0].stop)
            unsteered = Plan(begun, plan_regions(begun, sources), packs=view, reuse=request.reuse, model=self.model)
            plan = replace(plan, unsteered=unsteered)
        plan, missing = self._with_entries(plan, request)
        return plan, learned, missing

    def _laid_out(
        self, prompt: Prompt, composer: Composer, request: Request, host: Host
    ) -> tuple[Prompt, Mapping[Span, Composer]]:
        """`prompt` as `composer` lays it out, and the packs that it composes."""
        if not request.reuse:  # Everything is computed.
            return prompt, {}
        moved = []  # Those with KV of this model and of their tokens, but of another place.
        for span in prompt.spans:
            (is_home, fits), made_by = _stands(span, prompt), span.pack.fingerprint
            if fits and not is_home and (made_by == self.model or made_by.is_edit_of(self.model)):
                moved.append(span)
        laid_out, spans = composer.layout(prompt, moved, host)
        is_steered = request.steering is not None or any(span.pack.steering is not None for span in prompt.spans)
        if is_steered and laid_out is not prompt:  # Steered packs are computed, and nothing stands around them.
            return prompt, {}
        return laid_out, dict.fromkeys(spans, composer)

    def _steered(self, prompt: Prompt, request: Request) -> tuple[Region, ...]:
        """The steered regions of `prompt`. Checks their steerings against the model and warns of too strong ones."""
        steering = as_steering(request.steering, with_knowledge=bool(prompt.spans))
        steered = plan_steered(prompt, steering, request.scope)
        for part_steering in (part.steering for region in steered for part in region.parts):
            if part_steering is not None:
                part_steering.check(self.model)
                part_steering.warn_beyond_cliff()
        return steered

    def plan_kv(
        self, prefix: Prefix, token_ids: Sequence[int], namespace: str = "", before: Sequence[Span] = ()
    ) -> Plan:
        """The plan for the KV of `token_ids` after `prefix`, which contains the packs `before`.

        All other tokens belong to `namespace`, because the last one may contain the beginning of a pack.
        """
        ids = (*prefix, *token_ids)
        prompt, regions = Prompt(ids, as_text=tuple(before), owner=namespace), plan_regions(Prompt(prefix))
        return Plan(prompt, regions, wanted=(len(prefix), len(ids)), model=self.model)

    def _sources(
        self, prompt: Prompt, composed: Mapping[Span, Composer], view: PackView | None
    ) -> tuple[Prompt, Sources, Learned]:
        """`prompt` with its packs as stored for their places, where their KV comes from, and what to compile."""
        sources: dict[Span, Composer | None] = {**composed}
        learned, spans = list[tuple[KnowledgePack, Plan]](), list[Span]()
        for rendered in prompt.spans:
            span = rendered if rendered in composed else self._stored(rendered, prompt, view)
            pack, (is_home, fits) = span.pack, _stands(span, prompt)
            is_exact = is_home and fits and pack.fingerprint == self.model
            if is_exact:
                sources.setdefault(span, None)
            elif is_home and fits and pack.fingerprint.is_edit_of(self.model):
                sources[span] = _OVERWRITTEN  # Only the text that was overwritten is what it stands for.
            elif is_home and pack.fingerprint == ModelFingerprint.unknown() and pack.text:
                # The store has only KV that another engine computed, so this engine compiles the pack too.
                learned.append(self._compiled(span, prompt))
            spans.append(span)
        return replace(prompt, spans=tuple(spans)), sources, learned

    def _stored(self, span: Span, prompt: Prompt, view: PackView | None) -> Span:
        """`span` with its pack as it is stored for exactly the tokens before it, if it is."""
        pack, key = span.pack, PackKey(self.model, prompt.token_ids[: span.start])
        if view is None or pack.steering is not None or not find_handles(span.handle):
            return span
        if pack.fingerprint != self.model or pack.prefix == key.prefix:
            return span
        stored = view.peek(Handle.parse(span.handle), key)
        if stored is not None and key.fits(stored) and stored.stored_bytes:
            # At another place the pack may begin and end with other tokens.
            stop = min(span.stop, span.start + len(stored.token_ids))
            there = replace(span, stop=stop, reference=replace(span.reference, pack=stored))
            return there if all(_stands(there, prompt)) else span
        return span

    def _compiled(self, span: Span, prompt: Prompt) -> tuple[KnowledgePack, Plan]:
        """The pack of `span` as compiled for its position, without KV, and the plan that computes its KV."""
        ids, prefix = prompt.token_ids[span.start : span.stop], prompt.token_ids[: span.start]
        pack = replace(span.pack, token_ids=ids, prefix=prefix, fingerprint=self.model, kv=None)
        before = [earlier for earlier in (*prompt.spans, *prompt.as_text) if earlier.start < span.start]
        return pack, self.plan_kv(prefix, ids, pack.namespace, before)

    def cached_tokens(self, plan: Plan) -> int:
        """How many tokens of a prompt, from the first on, are in memory."""
        return self._engine.cached_tokens(plan) if isinstance(self._engine, HasCache) and plan.reuse else 0

    def note(self, met: Iterable[Hashable]) -> None:
        """Remember what a request met: what it meets again is compiled or kept."""
        with self._lock:
            self._met.update(dict.fromkeys(met))
            while len(self._met) > _REMEMBERED:
                del self._met[next(iter(self._met))]

    def _with_entries(self, plan: Plan, request: Request) -> tuple[Plan, Sequence[Hashable]]:
        """`plan` with the entries that fit along it and those to store, and all others, which the store lacks.

        Raises `OptionError` for a `keep_in` that the view may not read.
        """
        view, space = request.view, request.keep_in
        if view is None:
            return plan, ()
        if space is not None and space not in view.namespaces:
            raise OptionError(f"Got keep_in={space!r}; expected one of the view: {sorted(view.namespaces)}.")
        if not plan.reuse or plan.unsteered is not None or request.keep == "never" or not view.source.keeps:
            return plan, ()
        if space is None and len(view.namespaces) == 1:
            [space] = view.namespaces
        if space is None and not plan.prompt.spans:
            return plan, ()
        # KV in memory was met, too, if only as text.
        always = request.keep == "always"
        until = len(plan.prompt) if always else max(self.cached_tokens(plan), plan.prompt.marked)
        along = list(entries_along(plan, self.model, self._heads, space, view.has, until, lazy=always))
        missing = {part: entry for part, entry, is_stored in along if not is_stored}
        keep = {part: entry for part, entry in missing.items() if part[1] <= until or entry in self._met}
        stored = {part: entry for part, entry, is_stored in along if is_stored}
        return replace(plan, entries=stored, keep=keep), tuple(missing[part] for part in missing.keys() - keep.keys())

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


def _report(handles: Sequence[tuple[str, str]], view: PackView | None, request: Request) -> None:
    """Raise or log, as the request wants it, that `handles`, each with the role that named it, bring no pack."""
    trusted = TRUSTED_ROLES if view is None else view.trusted_roles
    for name, role in handles:
        reason = why_unresolved(name, view, role)
        if request.unresolved == "error" and role in trusted:
            raise PackNotFoundError(f'{name} does not resolve: {reason}. `unresolved="warn"` sends it as text.')
        if request.unresolved != "text" and role in trusted:
            logger.warning("Handle %s stays text: %s.", name, reason)  # Each answer lacks what it stands for.
        elif request.unresolved != "text":
            warn_once(logger, "Handle %s stays text: %s.", name, reason)
