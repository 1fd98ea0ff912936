"""The canonical prompt: token ids, and the spans of packs in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from kp_core.errors import OptionError
from kp_core.packs.pack import KnowledgePack
from kp_core.packs.view import PackRef


@dataclass(frozen=True, eq=False)
class SoftTokens:
    """Input embeddings before and behind the tokens of a pack, `(soft tokens, hidden)` each, in float32 on the CPU.

    Raises `OptionError` for tensors of another shape, and for values that are not finite.
    """

    header: Tensor
    trailer: Tensor

    def __post_init__(self) -> None:
        for name in ("header", "trailer"):
            tensor = getattr(self, name).detach().to("cpu", torch.float32).contiguous()
            if tensor.ndim != 2 or tensor.shape[1] != self.header.shape[-1] or not tensor.isfinite().all():
                raise OptionError(
                    f"Got a {name} of shape {tuple(tensor.shape)}; expected finite numbers (soft tokens, hidden), "
                    "as wide in the header as in the trailer."
                )
            object.__setattr__(self, name, tensor)

    @property
    def content(self) -> bytes:
        """Shapes and values, for digests."""
        tensors = (self.header, self.trailer)
        return b"".join(f"{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes() for tensor in tensors)

    @cached_property
    def id(self) -> str:
        """Digest of the embeddings."""
        return blake2b(self.content, digest_size=16).hexdigest()

    def around(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """`token_ids` with placeholders for the soft tokens: their first and their last, repeated."""
        return (*token_ids[:1] * len(self.header), *token_ids, *token_ids[-1:] * len(self.trailer))

    def between(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `around`."""
        return token_ids[len(self.header) : len(token_ids) - len(self.trailer)]


@dataclass(frozen=True)
class Span:
    """The tokens `start:stop` of a prompt that the pack of `handle` delivers."""

    start: int
    stop: int
    reference: PackRef
    chars: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """Where the pack's text stands in `Prompt.rendered`; its edges may share tokens with the surrounding text."""
    soft: SoftTokens | None = field(default=None, compare=False, repr=False)
    """What stands around the pack's tokens, within the span."""

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
        """Number of tokens of the pack that belong to errata."""
        if self.reference.is_erratum:
            return len(self)
        return max(0, len(self) - self.pack.errata_start) if self.pack.edits.corrections else 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Prompt:
    """The token ids of a whole conversation, rendered in one call, with the spans of its packs.

    `rendered` is the tokenised text, with handles replaced by their text. It has guards in special-token strings of
    data; `ChatTemplate.text` removes them. `breaks` are the positions where messages begin.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    breaks: tuple[int, ...] = ()
    rendered: str = field(default="", compare=False, repr=False)
    as_text: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """Packs, and parts of packs, that are computed as plain text."""
    owner: str = field(default="", compare=False)
    """The namespace of all other tokens if they are the prefix of a pack to compile; empty in a conversation."""
    unread: int = field(default=0, compare=False)
    """Number of packs that the composer left out."""
    roles: tuple[str, ...] = field(default=(), compare=False)
    """The role of the message that begins at each of `breaks`."""
    unresolved: int = field(default=0, compare=False)
    """Number of handles that brought no pack and are plain text."""
    marked: int = field(default=0, compare=False)
    """The first tokens whose KV the conversation marks as to be kept."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pack_tokens(self) -> int:
        """Number of tokens that packs deliver in place of text."""
        return sum(map(len, self.spans))

    def owned(self, start: int, stop: int) -> Iterator[tuple[int, int, str]]:
        """Yield the tokens `start:stop` in parts, each with the namespace of its pack, else with `owner`."""
        for span in sorted((*self.spans, *self.as_text), key=lambda span: span.start) if self.as_text else self.spans:
            begin, end = max(span.start, start), min(span.stop, stop)
            if begin < end:
                if start < begin:
                    yield start, begin, self.owner
                yield begin, end, span.pack.namespace
                start = end
        if start < stop:
            yield start, stop, self.owner

    def packs(self, start: int, stop: int) -> set[tuple[str, int]]:
        """Return handle and end of each pack with some of the tokens `start:stop`."""
        spans = (*self.spans, *self.as_text)
        return {(span.handle, span.stop) for span in spans if span.start < stop and start < span.stop}

    def until(self, stop: int) -> Prompt:
        """Return the first `stop` tokens as a prompt, without rendered text; a pack across the end is cut."""
        spans = tuple(replace(span, stop=min(span.stop, stop)) for span in self.spans if span.start < stop)
        texts = tuple(replace(span, stop=min(span.stop, stop)) for span in self.as_text if span.start < stop)
        breaks = tuple(at for at in self.breaks if at < stop)
        return Prompt(self.token_ids[:stop], spans, breaks, as_text=texts, owner=self.owner)
