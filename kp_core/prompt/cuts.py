"""The canonical cuts of a prompt: where prefill stops and goes on, so that warm and cold runs round alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kp_core.packs.pack import Prefix
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["Cuts", "Stands", "cut", "is_home", "prefix_of"]

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


def cut(prompt: Prompt, chunk_tokens: int, stands: Stands = is_home) -> Cuts:
    """The chunks of `prompt`: cut at every message, at packs, and every `chunk_tokens` between.

    There is a cut behind every pack, and before the first of a message. Text between two packs is one chunk with the
    pack behind it, which saves a forward pass, unless that pack brings KV of its own (`stands`). Where a cut falls
    depends on the prompt before it and on nothing that is cached. Another rule needs another
    `kp_core.packs.fingerprint.CUT_RULE`.
    """
    # A pack is cut from its own beginning on, as it was when it was built, wherever a message may begin in it.
    within = {at for span in prompt.spans for at in range(span.start + 1, span.stop)}
    breaks = sorted(set(prompt.breaks) - within)
    cuts, before = [0], -1
    kept: list[Span] = []
    own: set[Span] = set()
    for span in prompt.spans:
        between = [at for at in breaks if before < at <= span.start]
        for at in between:
            _extend(cuts, at, chunk_tokens)
        brings = stands(span, lambda span=span: _prefix(prompt, cuts, span.start, chunk_tokens))  # type: ignore[misc]
        if brings is None:
            continue
        kept.append(span)
        if brings:
            own.add(span)
        if cuts[-1] < span.start and (before < 0 or between or brings):
            _extend(cuts, span.start, chunk_tokens)
        _extend(cuts, span.stop, chunk_tokens)
        before = span.stop
    for at in (*(at for at in breaks if at > before), len(prompt)):
        _extend(cuts, at, chunk_tokens)
    whole = prompt if len(kept) == len(prompt.spans) else replace(prompt, spans=tuple(kept))
    return Cuts(whole, tuple(itertools.pairwise(cuts)), frozenset(own))


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
    _extend(whole, start, chunk_tokens)
    return Prefix(prompt.token_ids[:start], tuple(whole[1:]))


def _extend(cuts: list[int], at: int, chunk_tokens: int) -> None:
    """Cut at `at`, and every `chunk_tokens` from the last cut up to it."""
    while cuts[-1] < at:
        cuts.append(min(cuts[-1] + chunk_tokens, at))
