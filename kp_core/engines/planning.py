"""From messages to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

from kp_core.compose import Composer, ExactComposer, NaiveComposer, WrappingComposer, laid_out
from kp_core.engines.keeping import Keeper
from kp_core.engines.ordering import Missing, Ordering, missing
from kp_core.engines.packs import CheckedSource, checked_view, explicit_packs
from kp_core.engines.request import Request
from kp_core.errors import ContextOverflowError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey, Prefix
from kp_core.packs.view import PackSource
from kp_core.plan import Limit, Plan, plan_regions
from kp_core.prompt.cuts import Cuts, cut, is_home
from kp_core.prompt.prompt import Prompt, Span
from kp_core.prompt.resolve import Message
from kp_core.prompt.template import ChatTemplate
from kp_core.steering import Block, as_steering, plan_blocks

__all__ = ["Learned", "Planner"]

_DEFAULT_MAX_TOKENS = 512
_RECOGNISED_TOKENS = 64  # A shorter pack costs more as a chunk of its own than it saves.
_REMEMBERED = 4096  # Positions of recognised texts that are counted.


@dataclass(frozen=True)
class Learned:
    """A pack that was met a second time behind a prefix it was not compiled for."""

    span: Span
    token_ids: tuple[int, ...]
    prefix: Prefix

    def pack(self) -> KnowledgePack:
        """The pack as it would be compiled for this prefix, without its KV."""
        return replace(self.span.pack, token_ids=self.token_ids, prefix=self.prefix, kv=None)


@dataclass
class _Sourced:
    """What was decided about the packs of one prompt."""

    packs: set[Span]
    composed: dict[Span, Composer]
    learned: list[Learned]


class Planner:
    """Makes plans for one model."""

    def __init__(
        self,
        template: ChatTemplate,
        identity: ModelFingerprint,
        max_positions: int,
        found: Callable[[Plan], int],
        *,
        joins: bool = False,
    ) -> None:
        """`found` tells how many tokens of a prompt, from the first on, are in memory; `joins` as in `cut`."""
        self._joins = joins
        self._found, self._ordering = found, Ordering()
        self._template, self._identity, self._max_positions = template, identity, max_positions
        self._chunk_tokens = int(identity.chunk_tokens)
        self._keeper = Keeper(template, identity)
        self._met: Counter[tuple[str, int]] = Counter()
        self._counting = Lock()

    def plan(
        self,
        messages: Sequence[Message] | str,
        request: Request,
        limit: Limit,
        *,
        tokens: int | None = None,
        learn: bool = True,
    ) -> tuple[Plan, list[Learned]]:
        """The plan of one request, whose answer may take `tokens` (by default what its sampling says).

        And the packs that should be compiled for where they stand; without `learn`, what is met is not counted. Raises
        `PromptError` and its kinds, `FingerprintMismatchError` for packs, steerings and wrappers of another model,
        `SteeringError`.
        """
        view = request.view
        checked = CheckedSource(view.source if view else None, self._identity, request.mismatch)
        readable = None
        if view is not None:
            readable = replace(checked_view(view, checked), recognise=view.recognise and request.recognise)
        render = partial(
            self._template.render,
            messages,
            view=readable,
            packs=explicit_packs(request.packs, view, checked),
            placement=request.placement,
            compact=request.compact,
            shape=request.shape,
            thinking=request.thinking,
        )
        prompt, reordered = self._ordering.prompt(
            render, lambda prompt: self._missing(prompt, request, checked), is_free=request.order == "free", learn=learn
        )
        if request.upgrade == "background" and self._is_upgraded(prompt, request, checked):
            request = replace(request, composer=ExactComposer())
        cuts, sourced = self._cut(prompt, request, checked, learn=learn)
        prompt, learned = cuts.prompt, sourced.learned
        blocks = self.blocks(prompt, cuts, request)
        laid = prompt
        if isinstance(composer := request.composer, WrappingComposer):
            composer.check(self._identity)
            if blocks or not request.reuse:  # Steered packs are computed, and without reuse everything is.
                request = replace(request, composer=ExactComposer())
            else:
                laid = self._laid_out(prompt, sourced, composer)
            cuts, sourced = self._cut(laid, request, checked)
            blocks = self.blocks(cuts.prompt, cuts, request)
        budget = self._budget(cuts.prompt, request, tokens)
        plan = Plan(
            cuts.prompt,
            plan_regions(cuts, sourced.packs, sourced.composed, blocks),
            request,
            budget,
            packs=checked,
            reuse=request.reuse,
            # What is behind decoded KV could not be read again bit for bit.
            deterministic=request.deterministic or (request.keep == "always" and view is not None),
            alone=request.deterministic,
            plain=None if laid is prompt else prompt,
            reordered=reordered,
            limit=limit,
        )
        if blocks:
            start, below = self._cut(prompt.until(blocks[0].stop), request, checked)
            regions = plan_regions(start, below.packs, below.composed)
            plan = replace(plan, below=replace(plan, prompt=start.prompt, regions=regions))
        return replace(plan, kept=self._keeper.of(plan, request, learn=learn)), learned

    def blocks(self, prompt: Prompt, cuts: Cuts, request: Request, *, answering: bool = True) -> tuple[Block, ...]:
        """What is to be steered in `prompt`."""
        steering = as_steering(request.steering, with_knowledge=bool(prompt.spans))
        blocks = plan_blocks(prompt, steering, request.scope, cuts.chunks, answering=answering)
        for block in blocks:
            for part in block.parts:
                part.steering.check(self._identity)
                part.steering.warn_beyond_cliff()
        return blocks

    def pinned(self, pack: KnowledgePack, span: Span) -> Plan:
        """The plan that holds `pack` behind the prefix it was compiled for, and nothing behind it."""
        prompt = Prompt(pack.prefix.token_ids + pack.token_ids, (span,), pack.prefix.cuts)
        cuts, sourced = self._cut(prompt, Request())
        blocks = self.blocks(prompt, cuts, Request(), answering=False)
        plan = Plan(prompt, plan_regions(cuts, sourced.packs, blocks=blocks), deterministic=True)
        if blocks:
            plan = replace(plan, below=replace(plan, regions=plan_regions(cuts, sourced.packs)))
        return plan

    def wanted(self, prefix: Prefix, token_ids: Sequence[int]) -> Plan:
        """The plan for the KV of `token_ids` behind `prefix`."""
        before = Prompt(prefix.token_ids, breaks=prefix.cuts)
        ids = (*prefix.token_ids, *token_ids)
        regions = plan_regions(cut(before, self._chunk_tokens))
        return Plan(replace(before, token_ids=ids), regions, wanted=(len(prefix), len(ids)), deterministic=True)

    def _cut(
        self, prompt: Prompt, request: Request, source: PackSource | None = None, *, learn: bool = False
    ) -> tuple[Cuts, _Sourced]:
        """The canonical chunks of `prompt`, and where the KV of its packs comes from.

        Entries of a pack for other prefixes than its first one are read where they fit, and move no cut.
        """
        sourced = _Sourced(set(), {}, [])
        entries: dict[Span, KnowledgePack] = {}
        wanted, accepts, mine = set(request.composer.regions(prompt)), request.mismatch == "accept", self._identity

        def stands(span: Span, prefix: Callable[[], Prefix]) -> bool | None:
            pack, home = span.pack, is_home(span, prefix)
            fits = pack.token_ids == prompt.token_ids[span.start : span.stop]
            own = pack.fingerprint == mine
            if own and not home and (entry := self._entry(span, prompt, prefix(), source)):
                entries[span] = entry
            if span.recognised:
                usable = span in entries or (home and fits and own and (pack.kv is not None or pack.stored_bytes > 0))
                plain = pack.steering is None and request.steering is None
                if len(span) < _RECOGNISED_TOKENS or not plain:
                    return None
                return self._recognise(span, prompt, prefix(), sourced, usable=usable, learn=learn)
            if home and fits and own:
                sourced.packs.add(span)
            elif fits and span in wanted and not home and (own or (accepts and pack.fingerprint.same_model(mine))):
                sourced.composed[span] = request.composer
            elif fits and not own and accepts and pack.prefix.token_ids == prefix().token_ids:
                sourced.composed[span] = NaiveComposer("accept")
            return home or span in sourced.composed

        cuts = cut(prompt, self._chunk_tokens, stands, joins=self._joins)
        return _with_entries(cuts, sourced, entries), sourced

    def _laid_out(self, prompt: Prompt, sourced: _Sourced, composer: WrappingComposer) -> Prompt:
        """`prompt` with the packs wrapped that `composer` makes; itself where there are none."""
        wrapped = [span for span, each in sourced.composed.items() if each == composer]
        return laid_out(prompt, wrapped, self._template.ends(prompt), composer) if wrapped else prompt

    def _entry(self, span: Span, prompt: Prompt, prefix: Prefix, source: PackSource | None) -> KnowledgePack | None:
        """The entry of a pack for this very prefix, where its source has one."""
        if source is None or span.pack.steering is not None or not find_handles(span.handle):
            return None
        key = PackKey(self._identity, prefix)
        found = source.peek(Handle.parse(span.handle), key)
        if found is None or not key.fits(found) or found.cuts != span.pack.cuts or not found.stored_bytes:
            return None
        return found if found.token_ids == prompt.token_ids[span.start : span.stop] else None

    def _recognise(  # noqa: PLR0913 - what is known of one span
        self, span: Span, prompt: Prompt, prefix: Prefix, sourced: _Sourced, *, usable: bool, learn: bool
    ) -> bool | None:
        """Whether a recognised pack is read, or compiled for where it stands; `None` leaves it text."""
        if usable:
            sourced.packs.add(span)
        # It would be compiled in one go, and its errata are cut off.
        elif not span.pack.cuts and self._again(span, prefix, learn=learn):
            sourced.learned.append(Learned(span, prompt.token_ids[span.start : span.stop], prefix))
        else:
            return None
        return True

    def exact(self, plan: Plan) -> Plan:
        """The plan for the same prompt with nothing composed."""
        cuts, sourced = self._cut(plan.plain or plan.prompt, Request(), plan.packs)
        # What is kept has its place in the prompt as it was laid out.
        kept = None if plan.plain else plan.kept
        return replace(plan, prompt=cuts.prompt, regions=plan_regions(cuts, sourced.packs), plain=None, kept=kept)

    def _is_upgraded(self, prompt: Prompt, request: Request, source: PackSource) -> bool:
        """Whether the packs of a prompt, up to the last one, are in memory as exact composition has them."""
        if request.composer.exact or not prompt.spans:
            return False
        plan = self.exact(Plan(prompt, (), packs=source, reuse=request.reuse, deterministic=request.deterministic))
        return self._found(plan) >= prompt.spans[-1].stop

    def _missing(self, prompt: Prompt, request: Request, source: PackSource) -> Missing:
        """What a prompt would cost to compute now."""
        cuts, sourced = self._cut(prompt, request, source)
        regions = plan_regions(cuts, sourced.packs, sourced.composed)
        plan = Plan(cuts.prompt, regions, reuse=request.reuse, deterministic=request.deterministic)
        return missing(plan, self._found(plan))

    def _again(self, span: Span, prefix: Prefix, *, learn: bool) -> bool:
        """Whether a pack that was recognised by its text was met behind this prefix before."""
        place = (span.handle, hash(prefix))
        with self._counting:
            met = self._met[place] > 0
            if learn:
                if not met and len(self._met) >= _REMEMBERED:
                    del self._met[next(iter(self._met))]
                self._met[place] += 1
        return met

    def _budget(self, prompt: Prompt, request: Request, tokens: int | None) -> int:
        """How many tokens the answer may take."""
        left = self._max_positions - len(prompt)
        wanted = tokens if tokens is not None else request.max_tokens or min(_DEFAULT_MAX_TOKENS, max(left, 1))
        if wanted > left:
            raise ContextOverflowError(len(prompt), wanted, self._max_positions)
        return wanted


def _with_entries(cuts: Cuts, sourced: _Sourced, entries: Mapping[Span, KnowledgePack]) -> Cuts:
    """`cuts` with the spans that are cut off from what stands before them read from the entries found for them."""
    edges = {edge for chunk in cuts.chunks for edge in chunk}
    spans = list(cuts.prompt.spans)
    for at, span in enumerate(spans):
        if span in entries and {span.start, span.stop} <= edges and span not in sourced.composed:
            spans[at] = replace(span, reference=replace(span.reference, pack=entries[span]))
            sourced.packs.add(span)
    return replace(cuts, prompt=replace(cuts.prompt, spans=tuple(spans)))
