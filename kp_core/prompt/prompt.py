"""The canonical prompt: token ids, and which of them packs deliver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackRef

__all__ = ["Often", "Prompt", "Span", "common_length"]


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
    def edges(self) -> tuple[int, ...]:
        """Where the pack's prefill was cut (see `KnowledgePack.cuts`), and its end."""
        return (*(at for at in (self.start + at for at in self.pack.cuts) if at < self.stop), self.stop)

    @property
    def errata_tokens(self) -> int:
        """Those of its tokens that errata have."""
        if self.reference.is_erratum:
            return len(self)
        return self.stop - self.edges[0] if self.pack.edits.corrections else 0

    def __len__(self) -> int:
        return self.stop - self.start


Often: TypeAlias = "Callable[[], tuple[Prompt, int]]"
"""A prompt that is rendered when it is wanted, and where its packs end."""


@dataclass(frozen=True)
class Prompt:
    """The token ids of a whole conversation, rendered in one call, with the spans of its packs.

    `rendered` is what was tokenised, handles replaced by their text (special-token strings in data stand guarded in it;
    `ChatTemplate.text` gives it back readable). `breaks` are the positions where messages begin. `often` makes the same
    prompt with those of its packs alone that are often found together, where there are such, and tells where they end.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    breaks: tuple[int, ...] = ()
    rendered: str = field(default="", compare=False, repr=False)
    often: Often | None = field(default=None, compare=False, repr=False)

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

    def until(self, stop: int) -> Prompt:
        """The first `stop` tokens as a prompt, without its rendered text; a pack that stands across is cut short."""
        spans = tuple(replace(span, stop=min(span.stop, stop)) for span in self.spans if span.start < stop)
        return Prompt(self.token_ids[:stop], spans, tuple(at for at in self.breaks if at < stop))


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """How many tokens both begin with."""
    for at, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return at
    return min(len(left), len(right))
