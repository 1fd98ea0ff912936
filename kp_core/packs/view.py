"""Who may read which pack: a source of packs, the namespaces allowed, and the roles trusted to bring handles."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from kp_core.errors import KnowledgePackError, PromptError
from kp_core.packs.handle import Handle, check_namespace, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.recognise import PackTexts, TextIndex

__all__ = ["TRUSTED_ROLES", "PackRef", "PackSource", "PackView", "Packs", "Segment"]

logger = logging.getLogger(__name__)

TRUSTED_ROLES = frozenset({"system", "user", "tool"})


@dataclass(frozen=True)
class PackRef:
    """A pack at its position in a message, or as memory at the start of the system message."""

    handle: str
    pack: KnowledgePack = field(compare=False, repr=False)
    memory: bool = False
    recognised: bool = False
    """Whether the message holds the pack's text itself: the prompt is the same with and without the pack."""
    batch: int = 0
    """In memory: packs of one number came together, in one message or exchange."""
    is_erratum: bool = False
    """Whether `pack` holds only what was corrected since an earlier version of it, which stands before."""

    @property
    def text(self) -> str:
        """The text as it is in the prompt: memory is a list of paragraphs, each ending its line."""
        if self.memory:
            return self.pack.text.strip() + "\n"
        return self.pack.text.strip() if self.recognised else self.pack.text


Segment: TypeAlias = str | PackRef


class PackSource(Protocol):
    """Where packs come from, e.g. `PackStore`."""

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """The pack without its KV, or `None` when there is none under this handle; cheap, asked at every turn.

        Of several entries the one that fits `key`, else the first one of that model, else any.
        """

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """The pack, with its KV where that is stored and intact; the entry that `peek` tells."""


@runtime_checkable
class Packs(PackSource, Protocol):
    """Where packs are kept, e.g. `PackStore`: a source that also mints handles and takes packs in."""

    def handle(self, text: str, namespace: str) -> Handle:
        """The handle `text` has here, stored or not."""

    def put(self, pack: KnowledgePack) -> Handle:
        """Keep the pack, in place of what was kept for its text; returns its handle."""

    def remove(self, handle: Handle) -> None:
        """Forget the pack; raises `PackNotFoundError` where there is none."""

    def __iter__(self) -> Iterator[Handle]:
        """The handles of all packs."""

    def view(self, *namespaces: str, trusted_roles: Collection[str] = TRUSTED_ROLES) -> PackView:
        """The packs as a conversation may see them: these namespaces, brought in by these roles."""


@dataclass(frozen=True)
class PackView:
    """The packs a conversation may reach: a source, the namespaces allowed, and the roles trusted to bring handles.

    What does not resolve (namespace not allowed, role not trusted, no such pack) stays plain text and is logged.
    Text that comes out of a pack is never searched for handles.

    With `recognise`, the exact texts of packs in messages of trusted roles are found as well, if `texts` (the source,
    where it can) tells them; handles inside them are text.
    """

    source: PackSource
    namespaces: Collection[str]
    trusted_roles: Collection[str] = TRUSTED_ROLES
    recognise: bool = True
    texts: PackTexts | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.namespaces, str):
            raise PromptError(f"Got the string {self.namespaces!r} as namespaces; expected a collection of names.")
        object.__setattr__(self, "namespaces", frozenset(check_namespace(name) for name in self.namespaces))
        object.__setattr__(self, "trusted_roles", frozenset(self.trusted_roles))
        if self.texts is None and isinstance(self.source, PackTexts):
            object.__setattr__(self, "texts", self.source)

    def resolve(self, handle: Handle, role: str) -> KnowledgePack | None:
        """The pack without KV, when `role` may bring it in."""
        if role not in self.trusted_roles:
            reason = f"role {role!r} is not trusted"
        elif handle.namespace not in self.namespaces:
            reason = f"namespace {handle.namespace!r} is not allowed"
        else:
            pack = self.source.peek(handle)
            if pack is not None:
                return pack
            reason = "no such pack"
        logger.warning("Handle %s stays text: %s.", handle, reason)
        return None

    def split(self, text: str, role: str) -> tuple[Segment, ...]:
        """`text` cut into plain text, the packs its handles stand for, and those whose texts are recognised in it."""
        handles = find_handles(text)
        if handles and role in self.trusted_roles and (fetch := getattr(self.source, "prefetch", None)):
            fetch({(handle, None) for *_, handle in handles if handle.namespace in self.namespaces})
        found: list[tuple[int, int, Handle | PackRef]] = [*handles, *self._recognised(text, role)]
        segments: list[Segment] = []
        done = 0
        # Of two that begin together, the longer first: the handle is then inside the text.
        for start, stop, item in sorted(found, key=lambda part: (part[0], -part[1])):
            if start < done:
                continue
            if isinstance(item, PackRef):
                reference = item
            else:
                pack = self.resolve(item, role)
                if pack is None:
                    continue
                reference = PackRef(str(item), pack)
            segments += [text[done:start], reference]
            done = stop
        segments.append(text[done:])
        return tuple(segment for segment in segments if segment != "")

    def _recognised(self, text: str, role: str) -> Iterator[tuple[int, int, PackRef]]:
        """Where the texts of packs are in `text`."""
        if not self.recognise or self.texts is None or role not in self.trusted_roles:
            return
        index = TextIndex.of(self.texts)
        for start, stop, handle in index.find(self.texts, text, self.namespaces):
            # A pack that cannot be used is text here, which nobody asked to be more.
            with suppress(KnowledgePackError):
                pack = self.source.peek(handle)
                if pack is None:
                    index.discard(handle)
                elif pack.text.strip() == text[start:stop]:
                    yield start, stop, PackRef(str(handle), pack, recognised=True)
