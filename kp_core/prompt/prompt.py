"""The canonical prompt: token ids, and which of them packs deliver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kp_core.compose import ExactComposer
from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.view import PackRef

__all__ = ["Prompt", "Span", "Stands", "common_length"]

Stands: TypeAlias = Callable[[KnowledgePack, Prefix], bool]
"""Whether the KV of a pack may stand behind a prefix, as the `wants` of a composer says."""

_EXACTLY: Stands = ExactComposer().wants


@dataclass(frozen=True)
class Span:
    """The tokens `start:stop` of a prompt that the pack behind `handle` delivers."""

    start: int
    stop: int
    reference: PackRef
    chars: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Where the pack's text stands in `Prompt.rendered`; its edges may share a token with what stands around it."""

    @property
    def handle(self) -> str:
        """The handle of the pack."""
        return self.reference.handle

    @property
    def pack(self) -> KnowledgePack:
        """The pack, possibly without its KV."""
        return self.reference.pack

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Prompt:
    """The token ids of a whole conversation, rendered in one call, with the spans of its packs.

    `rendered` is what was tokenised, handles replaced by their text (special-token strings in data stand guarded in it;
    `ChatTemplate.text` gives it back readable). `breaks` are the positions where messages begin.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    breaks: tuple[int, ...] = ()
    rendered: str = field(default="", compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pack_tokens(self) -> int:
        """Tokens inside packs."""
        return sum(len(span) for span in self.spans)

    def chunks(self, chunk_tokens: int, stands: Stands = _EXACTLY) -> tuple[tuple[int, int], ...]:
        """The canonical chunks, as `(start, stop)`: cut at every message, at packs, and every `chunk_tokens` between.

        There is a cut behind every pack, and before the first of a message. Text between two packs is one chunk with
        the pack behind it, which saves a forward pass, unless that pack's own KV may stand there (`stands`, the `wants`
        of a composer). Where a cut falls depends on the prompt before it and on nothing that is cached, so that a warm
        and a cold run prefill the same shapes and round alike.
        """
        # A pack is cut from its own beginning on, as it was when it was built, wherever a message may begin in it.
        inside = {at for span in self.spans for at in range(span.start + 1, span.stop)}
        breaks = sorted(set(self.breaks) - inside)
        cuts, before = [0], -1
        for span in self.spans:
            between = [at for at in breaks if before < at <= span.start]
            for at in between:
                _cut(cuts, at, chunk_tokens)
            if cuts[-1] < span.start and (
                before < 0 or between or stands(span.pack, self._prefix(cuts, span.start, chunk_tokens))
            ):
                _cut(cuts, span.start, chunk_tokens)
            _cut(cuts, span.stop, chunk_tokens)
            before = span.stop
        for at in (*(at for at in breaks if at > before), len(self)):
            _cut(cuts, at, chunk_tokens)
        return tuple(itertools.pairwise(cuts))

    def prefix(self, span: Span, chunk_tokens: int, stands: Stands = _EXACTLY) -> Prefix:
        """What stands before `span`, as a pack at this place would record it."""
        cuts = [0, *(stop for _, stop in self.chunks(chunk_tokens, stands) if stop <= span.start)]
        return self._prefix(cuts, span.start, chunk_tokens)

    def _prefix(self, cuts: Sequence[int], start: int, chunk_tokens: int) -> Prefix:
        """The first `start` tokens, prefilled with `cuts` and one at the end."""
        whole = list(cuts)
        _cut(whole, start, chunk_tokens)
        return Prefix(self.token_ids[:start], tuple(whole[1:]))

    def until(self, stop: int) -> Prompt:
        """The first `stop` tokens as a prompt, without its rendered text; a pack that stands across is cut short."""
        spans = tuple(replace(span, stop=min(span.stop, stop)) for span in self.spans if span.start < stop)
        return Prompt(self.token_ids[:stop], spans, tuple(at for at in self.breaks if at < stop))


def _cut(cuts: list[int], at: int, chunk_tokens: int) -> None:
    """Cut at `at`, and every `chunk_tokens` from the last cut up to it."""
    while cuts[-1] < at:
        cuts.append(min(cuts[-1] + chunk_tokens, at))


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for at, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return at
    return min(len(left), len(right))
