"""The canonical prompt: token ids, and which of them packs deliver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kp_core.packs.pack import KnowledgePack, Prefix
from kp_core.packs.view import PackRef

__all__ = ["Prompt", "Span"]


@dataclass(frozen=True)
class Span:
    """The tokens `start:stop` of a prompt that the pack behind `handle` delivers."""

    start: int
    stop: int
    reference: PackRef
    chars: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Where the pack's text stands in `Prompt.rendered`; its edges may share a token with what stands around it."""
    recognised: bool = False
    """Whether the text itself was sent, and the pack found by it."""

    @property
    def handle(self) -> str:
        """The handle of the pack."""
        return self.reference.handle

    @property
    def pack(self) -> KnowledgePack:
        """The pack, possibly without its KV."""
        return self.reference.pack

    @property
    def errata_tokens(self) -> int:
        """Those of its tokens that errata have."""
        if self.reference.is_erratum:
            return len(self)
        return max(0, len(self) - self.pack.errata_start) if self.pack.edits.corrections else 0

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
    as_text: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """Packs, and parts of packs, that are computed as the text that they are."""
    owner: str = field(default="", compare=False)
    """The namespace of all other tokens, where they are what a pack is compiled behind; blank in a conversation."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pack_tokens(self) -> int:
        """Tokens that packs deliver in place of text."""
        return sum(len(span) for span in self.spans if not span.recognised)

    @property
    def recognised_tokens(self) -> int:
        """Tokens that were sent as text, in which packs were recognised."""
        return sum(len(span) for span in self.spans if span.recognised)

    def prefix_of(self, span: Span) -> Prefix:
        """What stands before a pack."""
        return Prefix(self.token_ids[: span.start])

    def owned(self, start: int, stop: int) -> Iterator[tuple[int, int, str]]:
        """The tokens `start:stop` in parts, each with the namespace of the pack that it belongs to, or blank."""
        for span in sorted((*self.spans, *self.as_text), key=lambda span: span.start) if self.as_text else self.spans:
            begin, end = max(span.start, start), min(span.stop, stop)
            if begin < end:
                if start < begin:
                    yield start, begin, self.owner
                yield begin, end, span.pack.namespace
                start = end
        if start < stop:
            yield start, stop, self.owner

    def until(self, stop: int) -> Prompt:
        """The first `stop` tokens as a prompt, without its rendered text; a pack that stands across is cut short."""
        spans = tuple(replace(span, stop=min(span.stop, stop)) for span in self.spans if span.start < stop)
        texts = tuple(replace(span, stop=min(span.stop, stop)) for span in self.as_text if span.start < stop)
        breaks = tuple(at for at in self.breaks if at < stop)
        return Prompt(self.token_ids[:stop], spans, breaks, as_text=texts, owner=self.owner)
