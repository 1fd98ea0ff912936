"""Which packs of a prompt are moved to where they stand: as a client names it, as it is signed, and as it is loaded."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeAlias

from kp_core.compose import PacketComposer
from kp_core.compose.wrapper import wrapper_bytes
from kp_core.engines.vllm.altered import digest_of
from kp_core.errors import PromptError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, find_handles
from kp_core.packs.kept import EntryKey
from kp_core.packs.pack import PackKey, Prefix
from kp_core.plan import Plan

__all__ = ["KeptPart", "Laid", "MovedPack", "Packet", "Spliced", "Wrapping", "moved_packs"]

_BETWEEN = "between moved packs"  # How `EntryKey.before` of such entries begins.
_MOST_PACKS = 256


@dataclass(frozen=True)
class MovedPack:
    """The tokens `start:stop` of a prompt, whose KV is that of a pack, its keys turned `by` positions further."""

    start: int
    stop: int
    handle: Handle
    key: PackKey
    token_ids: tuple[int, ...]

    @property
    def by(self) -> int:
        """Positions, from where it was compiled."""
        return self.start - len(self.key.prefix or ())


@dataclass(frozen=True)
class KeptPart:
    """The tokens `start:stop` of a prompt, whose KV the server computed for moved packs and keeps under `key`."""

    key: EntryKey
    namespaces: tuple[str, ...]

    @property
    def start(self) -> int:
        """Its first token."""
        return self.key.at

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.key.at + len(self.key.token_ids)

    @property
    def handle(self) -> str:
        """What logs call it."""
        return "what moved packs need"


@dataclass(frozen=True)
class Packet:
    """The tokens `start:stop` of a prompt, whose KV is that of a pack between soft tokens, which is kept."""

    start: int
    stop: int
    kept: KeptPart
    handle: Handle

    @property
    def by(self) -> int:
        """Positions, from where it was compiled."""
        return self.start - self.kept.start


_Part: TypeAlias = MovedPack | Packet | KeptPart


@dataclass(frozen=True)
class Laid:
    """The KV of a prompt up to its last moved pack: packs, and what stands between, one behind the other."""

    parts: tuple[_Part, ...]
    namespaces: tuple[str, ...]
    """Those whose packs may be read."""
    start = 0

    @property
    def stop(self) -> int:
        """One past its last token."""
        return self.parts[-1].stop

    @property
    def handle(self) -> str:
        """What logs call it."""
        return f"{sum(not isinstance(part, KeptPart) for part in self.parts)} moved packs"


@dataclass(frozen=True)
class Wrapping:
    """A request for the KV of one pack between soft tokens, whose prompt is embeddings: it has no token ids.

    `token_ids` are those of the wrapped pack (`PacketComposer.wrap`), which stands behind the tokens `prefix`.
    """

    composer: str
    handle: str
    prefix: tuple[int, ...]
    token_ids: tuple[int, ...]
    keep = True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Wrapping:
        """What JSON made of `dataclasses.asdict`."""
        return cls(**{**data, **{name: tuple(data[name]) for name in ("prefix", "token_ids")}})

    @property
    def tokens(self) -> str:
        """`digest_of` no token ids."""
        return digest_of(())

    @property
    def label(self) -> str:
        """No other request has this one, as embeddings are not told by ids."""
        return repr(self)

    def leaves(self, model: ModelFingerprint, namespaces: tuple[str, ...], _token_ids: Sequence[int] = ()) -> KeptPart:
        """What it leaves behind."""
        key = EntryKey.wrapped(model, self.composer, Prefix(self.prefix), self.token_ids, self.handle)
        return KeptPart(key, namespaces)

    def begins(self, _model: ModelFingerprint, _namespaces: tuple[str, ...], _token_ids: Sequence[int]) -> None:
        """Nothing that is stored."""


@dataclass(frozen=True)
class Spliced:
    """Packs of one prompt that are moved, in order; all were compiled behind the tokens `prefix`.

    What stands before, between and behind them is computed, over all that stands before it. A server computes what
    follows what is loaded, and so it takes one request for each stretch of text before a moved pack, whose KV is kept
    (`KeptPart`).
    """

    moved: tuple[tuple[int, int, str], ...]
    """Start, stop and handle of each."""
    prefix: tuple[int, ...] = ()
    packs: tuple[tuple[str, int], ...] = ()
    """Handles of all packs in the prompt, and where they begin: with a pack goes what was kept behind it."""
    tokens: str = ""
    """`digest_of` the prompt's token ids."""
    keep: bool = False
    """Whether the KV of what stands behind the last moved pack is to be kept."""
    wrapped: str = ""
    """The key of the composer whose soft tokens they stand between, if they do."""

    @classmethod
    def of(cls, said: object, token_ids: object) -> Spliced:
        """What a client asks for, but for the prefix; raises `PromptError`, which says what is wrong with it."""
        if not isinstance(token_ids, list) or not all(type(each) is int and each >= 0 for each in token_ids):
            raise PromptError("Got 'kp' with a prompt that is not one list of token ids; packs are placed by them.")
        if not isinstance(said, Mapping) or set(said) - {"moved", "packs", "wrapper"}:
            raise PromptError("Expected 'kp': {'moved': …, 'packs': …}, as `VLLMEngine` sends it.")
        try:
            moved = tuple((int(start), int(stop), str(handle)) for start, stop, handle in said["moved"])
            packs = tuple((str(handle), int(start)) for handle, start in said.get("packs", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise PromptError(f"Got 'kp' that cannot be read ({type(error).__name__}: {error}).") from error
        edges = [0, *(edge for start, stop, _ in moved for edge in (start, stop)), len(token_ids) - 1]
        ordered = all(one <= other for one, other in pairwise(edges))
        if not 0 < len(moved) <= _MOST_PACKS or not ordered or any(start == stop for start, stop, _ in moved):
            raise PromptError(
                f"Got moved packs at {[each[:2] for each in moved]} of {len(token_ids)} tokens; expected 1 to "
                f"{_MOST_PACKS} in order, and the last token behind them."
            )
        return cls(moved, packs=packs, tokens=digest_of(token_ids))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spliced:
        """What JSON made of `dataclasses.asdict`."""
        rows = {name: tuple(map(tuple, data[name])) for name in ("moved", "packs")}
        return cls(**{**data, **rows, "prefix": tuple(data["prefix"])})

    @property
    def between(self) -> tuple[tuple[int, int], ...]:
        """The stretches of text before moved packs."""
        stops = (0, *(stop for _, stop, _ in self.moved))
        return tuple((stop, start) for stop, (start, _, _) in zip(stops, self.moved, strict=False) if stop < start)

    @property
    def label(self) -> str:
        """What is done to the prompt, and where: of two requests with one label, equal ids have equal KV."""
        if not self.moved:
            return ""
        about = repr((self.wrapped, self.prefix))
        return "\0".join(["splice", about, *map(repr, self.moved)])

    def until(self, stop: int, token_ids: Sequence[int]) -> Spliced:
        """The request that computes the text that ends at `stop`, and keeps it."""
        moved = tuple(each for each in self.moved if each[1] <= stop)
        packs = tuple(each for each in self.packs if each[1] < stop)
        return replace(self, moved=moved, packs=packs, tokens=digest_of(token_ids[:stop]), keep=True)

    def leaves(self, model: ModelFingerprint, namespaces: tuple[str, ...], token_ids: Sequence[int]) -> KeptPart:
        """What a request with `keep` leaves behind."""
        start = self.moved[-1][1] if self.moved else 0
        # Who reads other namespaces has entries of their own, so that time says nothing about what others ask.
        behind = "\0".join([",".join(sorted(namespaces)), self.label, digest_of(token_ids[:start])])
        before = f"{_BETWEEN} {blake2b(behind.encode(), digest_size=32).hexdigest()}"
        packs = tuple(handle for handle, at in self.packs if at < len(token_ids))
        home = min(namespaces, default="default")
        return KeptPart(EntryKey(model, start, before, tuple(token_ids[start:]), packs, home), namespaces)

    def begins(self, model: ModelFingerprint, namespaces: tuple[str, ...], token_ids: Sequence[int]) -> Laid | None:
        """What a request begins with; `None` where nothing is moved."""
        between: list[_Part] = [
            self.until(stop, token_ids).leaves(model, namespaces, token_ids[:stop]) for _, stop in self.between
        ]
        moved = [self._part(model, namespaces, each, tuple(token_ids[each[0] : each[1]])) for each in self.moved]
        return Laid(tuple(sorted([*between, *moved], key=lambda part: part.start)), namespaces) if moved else None

    def wrapping(self, handle: str, token_ids: tuple[int, ...]) -> Wrapping:
        """The request that computes one of the packs between its soft tokens."""
        return Wrapping(self.wrapped, handle, self.prefix, token_ids)

    def _part(
        self,
        model: ModelFingerprint,
        namespaces: tuple[str, ...],
        moved: tuple[int, int, str],
        token_ids: tuple[int, ...],
    ) -> _Part:
        start, stop, name = moved
        handle = Handle.parse(name)
        if self.wrapped:
            return Packet(start, stop, self.wrapping(name, token_ids).leaves(model, namespaces), handle)
        return MovedPack(start, stop, handle, PackKey(model, Prefix(self.prefix)), token_ids)


def moved_packs(plan: Plan) -> dict[str, Any] | None:
    """What a client sends for the packs of a plan that are moved; `None` where there are none."""
    spans = [span for region in plan.regions if region.composer for span in region.spans]
    if not spans:
        return None
    packs = [[span.handle, span.start] for span in plan.prompt.spans if find_handles(span.handle)]
    said = {"moved": [[span.start, span.stop, span.handle] for span in spans], "packs": packs}
    for region in plan.regions:
        if isinstance(region.composer, PacketComposer):
            return said | {"wrapper": base64.b64encode(wrapper_bytes(region.composer.wrapper)).decode()}
    return said
