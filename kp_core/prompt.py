"""The canonical prompt: token ids, and which of them packs deliver."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from kp_core.pack import Head, KnowledgePack
from kp_core.resolve import PackRef

__all__ = ["Prompt", "Span"]


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

    def chunks(self, chunk_tokens: int) -> tuple[tuple[int, int], ...]:
        """The canonical chunks, as `(start, stop)`: cut at every span, every message, and every `chunk_tokens` between.

        Where a cut falls depends on the tokens before it and on nothing that is cached, so that a warm and a cold run
        prefill the same shapes and round alike.
        """
        # A pack is cut from its own beginning on, as it was when it was built, wherever a message may begin in it.
        inside = {at for span in self.spans for at in range(span.start + 1, span.stop)}
        edges = {0, len(self.token_ids), *(set(self.breaks) - inside)}
        for span in self.spans:
            edges.update((span.start, span.stop))
        ordered = sorted(edge for edge in edges if 0 <= edge <= len(self.token_ids))
        return tuple(
            (at, min(at + chunk_tokens, stop))
            for start, stop in itertools.pairwise(ordered)
            for at in range(start, stop, chunk_tokens)
        )

    def head(self, span: Span, chunk_tokens: int) -> Head:
        """What stands before `span`, as a pack at this place would record it."""
        cuts = tuple(stop for _, stop in self.chunks(chunk_tokens) if stop <= span.start)
        return Head(self.token_ids[: span.start], cuts)

    def until(self, stop: int) -> Prompt:
        """The first `stop` tokens as a prompt, without its rendered text; a pack that stands across is cut short."""
        spans = tuple(replace(span, stop=min(span.stop, stop)) for span in self.spans if span.start < stop)
        return Prompt(self.token_ids[:stop], spans, tuple(at for at in self.breaks if at < stop))
