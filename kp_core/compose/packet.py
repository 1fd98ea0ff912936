"""Composes packs between trained soft tokens; each is compiled once and composed without a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kp_core.compose.base import Forward, Region
from kp_core.compose.splice import spliced
from kp_core.compose.wrapper import SHIPPED, Wrapper, load_wrapper
from kp_core.kv import KVTensors
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.pack import KnowledgePack
from kp_core.prompt.prompt import Prompt, Span

__all__ = ["PacketComposer", "laid_out"]


@dataclass(frozen=True)
class PacketComposer:
    """Moves packs together with the soft tokens of `wrapper` around them (KV Packet, arXiv 2604.13226, section 3).

    Header, pack and trailer are compiled behind the prefix of the pack, once for each wrapper, and stored. At use they
    are copied and their keys rotated, without a forward pass. Soft tokens take positions of the prompt, and count as
    approximate like their packs. A pack behind the prefix it was compiled for is exact and has no soft tokens.
    Approximate, and best on the kind of text that the wrapper was trained on: measure with `compare_composers` before
    you use it.
    """

    wrapper: Wrapper
    exact = False

    @classmethod
    def load(cls, wrapper: str | Path | None = None) -> PacketComposer:
        """A composer with the wrapper in a file, by default that of the bundled model; raises `WrapperError`."""
        return cls(load_wrapper(SHIPPED if wrapper is None else wrapper))

    @property
    def key(self) -> str:
        """Method and digest of the wrapper."""
        return f"packet:{self.wrapper.id}"

    def check(self, fingerprint: ModelFingerprint) -> None:
        """See `Wrapper.check`."""
        self.wrapper.check(fingerprint)

    def regions(self, prompt: Prompt) -> tuple[Span, ...]:
        """All packs."""
        return prompt.spans

    def wrap(self, pack: KnowledgePack, token_ids: Sequence[int]) -> KnowledgePack:
        """The pack with `token_ids` between its soft tokens, without KV.

        The first and last of `token_ids` are repeated as placeholder ids of the soft tokens.
        """
        before, behind = (token_ids[0],) * len(self.wrapper.header), (token_ids[-1],) * len(self.wrapper.trailer)
        return replace(pack, token_ids=(*before, *token_ids, *behind), kv=None)

    def unwrapped(self, pack: KnowledgePack) -> tuple[int, ...]:
        """The ids between the soft tokens of a wrapped pack."""
        return pack.token_ids[len(self.wrapper.header) : len(pack.token_ids) - len(self.wrapper.trailer)]

    def compile(self, pack: KnowledgePack, forward: Forward) -> KVTensors:
        """KV of a wrapped pack behind its own prefix, soft tokens included."""
        return forward.soft(pack.prefix.token_ids, self.wrapper.header, self.unwrapped(pack), self.wrapper.trailer)

    def fill(self, region: Region, packs: Sequence[KnowledgePack], forward: Forward) -> KVTensors:
        """The wrapped packs' KV, moved."""
        return spliced(region, packs, forward)


def laid_out(prompt: Prompt, wanted: Collection[Span], ends: Sequence[int], composer: PacketComposer) -> Prompt:
    """`prompt` with the `wanted` spans wrapped in soft tokens; later tokens move to higher positions.

    `ends` has the end of each span including the blank tokens behind it (`ChatTemplate.ends`). These become part of the
    wrapped pack, so that no tokens between packs must be computed.
    """
    ids: list[int] = []
    spans: list[Span] = []
    texts: list[Span] = []
    breaks: list[int] = []
    consumed = 0
    for span, end in zip((*prompt.spans, None), (*ends, len(prompt)), strict=True):
        start = len(prompt) if span is None else span.start
        breaks += [
            at - consumed + len(ids) for at in prompt.breaks if consumed <= at < start or at == start == len(prompt)
        ]
        moved = len(ids) - consumed
        between = [text_span for text_span in prompt.as_text if consumed <= text_span.start < start]
        texts += [
            replace(text_span, start=text_span.start + moved, stop=text_span.stop + moved) for text_span in between
        ]
        ids += prompt.token_ids[consumed:start]
        consumed = start
        if span is not None and span in wanted:
            wrapped = composer.wrap(span.pack, prompt.token_ids[start:end])
            # A message may begin at the start of a pack, never inside it.
            breaks += [len(ids)] if start in prompt.breaks else []
            reference = replace(span.reference, pack=wrapped)
            spans.append(replace(span, start=len(ids), stop=len(ids) + len(wrapped.token_ids), reference=reference))
            ids += wrapped.token_ids
            consumed = end
        elif span is not None:
            spans.append(replace(span, start=len(ids), stop=len(ids) + len(span)))
    return replace(prompt, token_ids=tuple(ids), spans=tuple(spans), breaks=tuple(breaks), as_text=tuple(texts))
