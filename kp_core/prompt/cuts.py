"""The canonical cuts of a prompt: where prefill stops and goes on, so that warm and cold runs round alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kp_core.packs.pack import Prefix
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["Cuts", "Stands", "cut", "is_home", "prefix_of"]

_LEAD_TOKENS = 64
"""The fewest tokens of a first pack that is cut off always: its own entries may then be read wherever it leads."""
_PASS_TOKENS = 96
"""What a further forward pass costs, in tokens of a long one: 45 on one machine with 2 cores, 90 on another."""
_SHORT_PAST = 256
"""Tokens before a chunk over which attention is as fast in small parts."""
_SPARSE = 1 / 2
"""Where passes join, the tokens since the last cut for which packs are cut apart, as a share of those before it but for
`_SHORT_PAST`: attention over a long past is slower in small parts."""
_INVESTED = 1 / 32
"""Share of the tokens of a first use that may be spent on passes that only the next use gains by."""

Stands: TypeAlias = Callable[[Span, Callable[[], Prefix]], bool | None]
"""Whether KV of its own may be used for a span behind a prefix; `None` for a span that is to be plain text."""


@dataclass(frozen=True)
class Cuts:
    """A prompt without the spans that became plain text, its canonical chunks, and which spans bring their own KV."""

    prompt: Prompt
    chunks: tuple[tuple[int, int], ...]
    own: frozenset[Span]


def is_home(span: Span, prefix: Callable[[], Prefix]) -> bool:
    """Whether the pack was compiled behind this very prefix: the same tokens, cut alike."""
    made = span.pack.prefix
    return len(made) == span.start and made == prefix()


def cut(prompt: Prompt, chunk_tokens: int, stands: Stands = is_home, *, joins: bool = False) -> Cuts:
    """The chunks of `prompt`: cut at every message, at packs, and every `chunk_tokens` between.

    There is a cut on both sides of a pack that brings KV of its own (`stands`), and of the first pack of a message
    where it is worth a pass. Other packs that came together share forward passes: behind one of them there is a cut
    only where `_Credit` can pay. Packs in memory that came at different times are cut apart, as the messages that
    brought them would be. Where a cut falls depends on the prompt before it, and on whether its message holds another
    pack, and on nothing that is cached. A pack with errata is cut before each of them wherever its end is cut.

    Where an engine `joins` passes, a cut costs none: there is one behind every pack whose end is `_LEAD_TOKENS` from
    the last cut, or more the more stands before that (`_SPARSE`), and behind the last pack of a message.
    """
    # A pack is cut from its own beginning on, as it was when it was built, wherever a message may begin in it.
    within = {at for span in prompt.spans for at in range(span.start + 1, span.stop)}
    breaks = sorted(set(prompt.breaks) - within)
    cuts, before = [0], -1
    kept: list[Span] = []
    own: set[Span] = set()
    credit = _Credit()
    for span, following in itertools.zip_longest(prompt.spans, prompt.spans[1:]):
        between = [at for at in breaks if before <= at <= span.start]
        _extend(cuts, between, chunk_tokens)
        if between:
            credit = _Credit()
        brings = stands(span, lambda span=span: _prefix(prompt, cuts, span.start, chunk_tokens))  # type: ignore[misc]
        if brings is None:
            continue
        kept.append(span)
        is_first, before = before < 0 or bool(between), span.stop
        credit.computes(span.start, cuts[-1])
        # It may have an entry for this place, which moves no cut: the first pack is cut off either way.
        leads = is_first and len(span) >= _LEAD_TOKENS
        if brings or leads:
            _extend(cuts, (span.start,), chunk_tokens)
        if brings:
            own.add(span)
            credit.saves(span)
            _extend(cuts, span.edges, chunk_tokens)
            continue
        credit.computes(span.stop, cuts[-1])
        is_last = following is None or any(span.stop <= at <= following.start for at in breaks)
        ends = is_last or following is None or following.reference.batch != span.reference.batch
        if joins:
            is_worth = is_last or span.stop - cuts[-1] >= max(_LEAD_TOKENS, (cuts[-1] - _SHORT_PAST) * _SPARSE)
        else:
            is_worth = credit.pays(_PASS_TOKENS if is_last else 2 * _PASS_TOKENS)
        # What comes to memory later stands behind this, so the end of what came together is where the two prompts part.
        if is_worth or leads or (ends and span.reference.memory):
            _extend(cuts, span.edges, chunk_tokens)
    _extend(cuts, (*(at for at in breaks if at >= before), len(prompt)), chunk_tokens)
    whole = prompt if len(kept) == len(prompt.spans) else replace(prompt, spans=tuple(kept))
    return Cuts(whole, tuple(itertools.pairwise(cuts)), frozenset(own))


class _Credit:
    """How many forward passes more than for text the packs of one message may take, counted in tokens.

    A further pass costs about what `_PASS_TOKENS` tokens cost. It is paid for by tokens that need no computing here,
    as their pack was compiled for this place, and by a small share of those that are computed: so much a first use may
    take longer, so that the next one with these packs computes none of them. Short facts are thus computed together
    with the question, as text would be, and a combination of longer packs is found again at its last one.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._counted = 0

    def saves(self, span: Span) -> None:
        """The pack brings its KV."""
        self._tokens += len(span)
        self._counted = span.stop

    def computes(self, stop: int, chunk: int) -> None:
        """All up to `stop` that was not counted is computed, from the beginning of its chunk on."""
        self._tokens += max(stop - max(self._counted, chunk), 0) * _INVESTED
        self._counted = stop

    def pays(self, needed: int) -> bool:
        """Take the cost of one pass, if `needed` tokens are there."""
        if self._tokens < needed:
            return False
        self._tokens -= _PASS_TOKENS
        return True


def prefix_of(prompt: Prompt, span: Span, chunk_tokens: int) -> Prefix:
    """What stands before `span`, as a pack compiled for this position records it."""
    found: list[Prefix] = []

    def stands(each: Span, prefix: Callable[[], Prefix]) -> bool:
        if each is span:
            found.append(prefix())
        return is_home(each, prefix)

    cut(prompt, chunk_tokens, stands)
    return found[0]


def _prefix(prompt: Prompt, cuts: Sequence[int], start: int, chunk_tokens: int) -> Prefix:
    """The first `start` tokens, prefilled with `cuts` and one at the end."""
    whole = list(cuts)
    _extend(whole, (start,), chunk_tokens)
    return Prefix(prompt.token_ids[:start], tuple(whole[1:]))


def _extend(cuts: list[int], edges: Iterable[int], chunk_tokens: int) -> None:
    """Cut at `edges`, and every `chunk_tokens` from the last cut up to each."""
    for at in edges:
        while cuts[-1] < at:
            cuts.append(min(cuts[-1] + chunk_tokens, at))
