"""Access to packs: a store, the allowed namespaces, the roles that may bring handles, and the model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, TypeAlias

from kp_core.errors import PackError, PackNotFoundError, PromptError
from kp_core.packs.blobs import Blobs
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle, check_namespace, find_handles
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.pickling import Shared

if TYPE_CHECKING:
    from kp_core.kv import KVTensors
    from kp_core.packs.codec import Compression
    from kp_core.packs.entry import Entry

logger = logging.getLogger(__name__)

TRUSTED_ROLES = frozenset({"system", "user", "tool"})

_DELETED, _REPLACED = "This passage was deleted.", "This passage was replaced:\n"

Mismatch: TypeAlias = Literal["error", "rebuild"]
"""What to do with a pack of another model; see `usable`."""
Unresolved: TypeAlias = Literal["error", "warn", "text"]
"""What to do with a handle that brings no pack: raise, log it once and send it as text, or only send it as text."""


@dataclass(frozen=True)
class PackRef:
    """A pack at its position in a message, or as memory at the start of the system message."""

    handle: str
    pack: KnowledgePack = field(compare=False, repr=False)
    memory: bool = False
    is_erratum: bool = False
    """Whether `pack` holds only the corrections since an earlier version of it, which stands before."""

    @property
    def text(self) -> str:
        """The text as it stands in the prompt; memory is a list of paragraphs, each with a line end."""
        if self.memory:
            return self.pack.text.strip() + "\n"
        return self.pack.text


Segment: TypeAlias = str | PackRef


class Packs(Shared, ABC):
    """A store of packs: the base class of `PackStore`, and of a store of your own.

    A store that is only read needs `peek` and `get`; one that packs are put into also `handle`, `put`, `remove` and
    `__iter__`. The other members are optional.
    """

    blobs: Blobs | None = None
    """Where the packs' bytes lie; measurements on the packs are stored beside them."""
    keeps: bool = False
    """Whether `has`, `read` and `write` keep the KV that requests compute; else it is not asked for."""
    cancelled: object = object()
    """A token that changes when what waits to be compiled into this store is cancelled; see `Delivery.cancel`."""

    @property
    def changes(self) -> object:
        """A token that changes whenever packs are stored or removed; cheap, read for every message."""
        return None

    def removals(self, namespace: str) -> object:  # noqa: ARG002
        """Return a token that changes whenever a pack of `namespace` is removed; cheap, read for every request."""
        return None

    def handle(self, text: str, namespace: str) -> Handle:  # noqa: ARG002
        """Return the handle of `text` in this store, whether stored or not."""
        raise self._is_only_read()

    def put(self, pack: KnowledgePack) -> Handle:  # noqa: ARG002
        """Store the pack, replacing the pack of the same text; returns its handle."""
        raise self._is_only_read()

    def put_again(self, pack: KnowledgePack) -> bool:
        """Store `pack` as a further entry of a text that is stored; `False` if the text was removed meanwhile."""
        if self.peek(self.handle(pack.text, pack.namespace)) is None:
            return False
        self.put(pack)
        return True

    @abstractmethod
    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """Return the pack without its KV, or `None` if there is none; cheap, called at every turn.

        Of several entries it returns the one that fits `key`, else the first one of that model, else any.
        """

    @abstractmethod
    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """Return the entry that `peek` returns, with its KV if that is stored and intact."""

    def remove(self, handle: Handle) -> None:  # noqa: ARG002
        """Delete the pack; raises `PackNotFoundError` if there is none."""
        raise self._is_only_read()

    def bury(self, handle: Handle, successor: Handle | None = None) -> None:
        """Leave a mark that the pack of a deleted text is gone, or replaced by `successor`. By default there is none.

        It holds no text. Putting the text again lifts it, and a mark that names a successor stays.
        """

    def buried(self, handle: Handle) -> Handle | bool:  # noqa: ARG002
        """Return what a mark says of the pack: its successor, else whether there is one."""
        return False

    def __iter__(self) -> Iterator[Handle]:
        """Yield the handles of all packs."""
        raise self._is_only_read()

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]]) -> None:  # noqa: ARG002
        """Look up several entries in parallel, for stores where each access is slow."""
        return

    def has(self, entry: Entry, namespaces: Collection[str]) -> int:  # noqa: ARG002
        """Return of how many first tokens of `entry` there is KV that a view of these `namespaces` may read."""
        return 0

    def read(self, entry: Entry, namespaces: Collection[str]) -> KVTensors | None:  # noqa: ARG002
        """Return the KV of the tokens that `entry` and the stored one have in common, or `None`."""
        return None

    def read_into(self, room: KVTensors, entry: Entry, namespaces: Collection[str]) -> bool:  # noqa: ARG002
        """Read the KV of `entry`, if just the tokens of `room` are stored, there; returns whether that was possible."""
        return False

    def write(self, entry: Entry, kv: KVTensors, compression: Compression = "lossless") -> bool:  # noqa: ARG002
        """Store `kv` for `entry`; returns whether there was room for it."""
        return False

    def view(self, *namespaces: str, trusted_roles: Collection[str] = TRUSTED_ROLES) -> PackView:
        """Return the view of a conversation: these namespaces, and the roles that may bring handles."""
        return PackView(self, namespaces, trusted_roles)

    def _is_only_read(self) -> PackError:
        return PackError(f"The store of packs {type(self).__name__} is only read. Give a `PackStore`.")


@dataclass(frozen=True)
class PackView:
    """The packs that a conversation may use: a store, the allowed namespaces, and the roles that may bring handles.

    A handle that does not resolve (namespace not allowed, role not trusted, no such pack) stays plain text, and a
    request says what follows (`unresolved`). In place of a pack whose text was deleted stands a line that says so, with
    the pack that replaced it. The text of a pack is never searched for handles.

    With a `model`, the view returns only packs that this model may use (see `usable`). Raises `PackError` if `source`
    is no store of packs.
    """

    source: Packs
    namespaces: Collection[str]
    trusted_roles: Collection[str] = TRUSTED_ROLES
    model: ModelFingerprint | None = None
    mismatch: Mismatch = "error"
    removals: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    """`Packs.removals` of each namespace from before a request looked at packs."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, Packs):
            raise PackError(f"Got a {type(self.source).__name__} as store of packs; expected a `PackStore`.")
        if isinstance(self.namespaces, str):
            raise PromptError(f"Got the string {self.namespaces!r} as namespaces; expected a collection of names.")
        object.__setattr__(self, "namespaces", frozenset(check_namespace(name) for name in self.namespaces))
        object.__setattr__(self, "trusted_roles", frozenset(self.trusted_roles))

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """Return the pack without its KV; without a `key`, the first entry for the `model`."""
        pack = self.source.peek(handle, self._key(key))
        return pack and usable(pack, self.model, self.mismatch, str(handle))

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """Return the pack with its KV."""
        return usable(self.source.get(handle, self._key(key)), self.model, self.mismatch, str(handle))

    def has(self, entry: Entry) -> int:
        """See `Packs.has`."""
        return self.source.has(entry, self.namespaces)

    def read(self, entry: Entry) -> KVTensors | None:
        """See `Packs.read`."""
        return self.source.read(entry, self.namespaces)

    def read_into(self, room: KVTensors, entry: Entry) -> bool:
        """See `Packs.read_into`."""
        return self.source.read_into(room, entry, self.namespaces)

    def _key(self, key: PackKey | None) -> PackKey | None:
        return PackKey(self.model) if key is None and self.model is not None else key

    def split(self, text: str, role: str) -> tuple[Segment, ...]:
        """Split `text` into plain text and the packs of its handles that `role` may bring in."""
        handles = find_handles(text) if role in self.trusted_roles else []
        readable = {handle for *_, handle in handles if handle.namespace in self.namespaces}
        self.source.prefetch([(handle, self._key(None)) for handle in readable])
        segments, end = list[Segment](), 0
        for start, stop, handle in handles:
            if handle in readable and (parts := self._parts(handle)):
                segments += [text[end:start], *parts]
                end = stop
        segments.append(text[end:])
        return tuple(segment for segment in segments if segment != "")

    def _parts(self, handle: Handle) -> tuple[Segment, ...]:
        """What stands for `handle`: its pack, or if that was deleted a line, with the pack that replaced it."""
        met: list[Handle] = []
        at: Handle | bool = handle
        while isinstance(at, Handle) and at not in met:
            if (pack := self.peek(at)) is not None:
                return (*[_REPLACED] * bool(met), PackRef(str(at), pack))
            met.append(at)
            at = self.source.buried(at)
        return (_DELETED,) if at or len(met) > 1 else ()


def why_unresolved(name: str, view: PackView | None, role: str | None = None) -> str:
    """Say why `name`, which looks like a handle, brings no pack, alone or in a message of `role`."""
    if view is None:
        return "there is no store to look in; give a model `store=` and `namespaces=`, a session `view=store.view(…)`"
    if role is not None and role not in view.trusted_roles:
        return f"role {role!r} is not trusted"
    try:
        handle = Handle.parse(name)
    except PromptError:
        return "it is not a whole handle"
    if handle.namespace not in view.namespaces:
        return f"namespace {handle.namespace!r} is not allowed, only {', '.join(sorted(view.namespaces)) or 'none'}"
    what = "its text was deleted" if view.source.buried(handle) else "no such pack"
    return f"{what} in {view.source.blobs or view.source}"


def usable(pack: KnowledgePack, model: ModelFingerprint | None, mismatch: Mismatch, name: str) -> KnowledgePack:
    """Return `pack` as `model`, if any, may use it: unchanged, or as its text alone, to be computed anew.

    A pack of another model, or of this one in other numerics, raises `PackError`, but is computed anew
    with `mismatch="rebuild"`. It is always computed anew if another release or kind of processor only rounded it
    differently.
    """
    fingerprint = pack.fingerprint
    if model is None or fingerprint in (model, ModelFingerprint.unknown()) or fingerprint.is_edit_of(model):
        return pack
    if model.engine == "vllm" and fingerprint.same_model(model):
        # A server decides itself which KV it reads; only the tokens matter here.
        return replace(pack, kv=None, fingerprint=model)
    rounds_differently = fingerprint.diff(model).keys() <= {"passes"}
    if mismatch != "rebuild" and not rounds_differently:
        pack.check(model)
    reason = "another release or kind of processor" if rounds_differently else "another model"
    logger.warning("Pack %s was made by %s; its KV is computed anew from its text.", name, reason)
    return replace(pack, kv=None, token_ids=(), fingerprint=ModelFingerprint.unknown())


def explicit_packs(
    packs: Sequence[KnowledgePack | Handle | str], view: PackView | None, model: ModelFingerprint, mismatch: Mismatch
) -> tuple[PackRef, ...]:
    """Return references to the packs that a caller passed; raises for a handle that does not resolve."""
    references = []
    for pack in packs:
        if isinstance(pack, KnowledgePack):
            try:
                name = "pack:" + blake2b(pack.text.encode(), digest_size=8).hexdigest()
            except UnicodeEncodeError as error:
                raise PromptError("Got a pack of text that is not Unicode. Decode it with errors='replace'.") from error
            references.append(PackRef(name, usable(pack, model, mismatch, name)))
            continue
        handle = Handle.parse(pack)
        # The caller named it, not a message, so trusted roles do not matter.
        resolved = view.peek(handle) if view and handle.namespace in view.namespaces else None
        if resolved is None:
            raise PackNotFoundError(f"{handle} does not resolve: {why_unresolved(str(pack), view)}.")
        references.append(PackRef(str(pack), resolved))
    return tuple(references)
