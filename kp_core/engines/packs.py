"""Packs on their way into a prompt: is each one made by this model?"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from kp_core.engines.request import Mismatch
from kp_core.errors import PackNotFoundError, PromptError
from kp_core.packs.fingerprint import ModelFingerprint
from kp_core.packs.handle import Handle
from kp_core.packs.pack import KnowledgePack, PackKey
from kp_core.packs.view import PackRef, PackSource, PackView

__all__ = ["CheckedSource", "checked_view", "explicit_packs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedSource:
    """A source that gives only packs the model may use.

    A pack of another model raises `FingerprintMismatchError`, or with `mismatch="rebuild"` comes as text alone, to be
    computed anew. With `"accept"` a pack of the same model in other numerics comes as it is. A pack that was recovered
    from its text alone is computed anew without being asked, and so is one of the same model whose passes were computed
    in another way: by another release, or on another kind of processor.
    """

    source: PackSource | None
    fingerprint: ModelFingerprint
    mismatch: Mismatch

    def peek(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack | None:
        """The pack without its KV, checked; by default as it was first compiled for this model."""
        pack = None if self.source is None else self.source.peek(handle, key or PackKey(self.fingerprint))
        return None if pack is None else self.check(pack, str(handle))

    def get(self, handle: Handle, key: PackKey | None = None) -> KnowledgePack:
        """The pack with its KV, checked."""
        if self.source is None:
            raise PackNotFoundError(f"There is no store to look for {handle} in; pass `view=store.view(...)`.")
        return self.check(self.source.get(handle, key or PackKey(self.fingerprint)), str(handle))

    def prefetch(self, wanted: Collection[tuple[Handle, PackKey | None]], *, kv: bool = False) -> None:
        """As `PackStore.prefetch`, where the source is one that can."""
        if fetch := getattr(self.source, "prefetch", None):
            fetch([(handle, key or PackKey(self.fingerprint)) for handle, key in wanted], kv=kv)

    def check(self, pack: KnowledgePack, name: str) -> KnowledgePack:
        """`pack`, or its text alone; raises when another model made it and it may not be rebuilt."""
        made = pack.fingerprint
        if made in (self.fingerprint, ModelFingerprint.unknown()):
            return pack
        if self.fingerprint.engine == "vllm" and made.same_model(self.fingerprint):
            # Which KV a server reads, it decides itself; here only the tokens count.
            return replace(pack, kv=None, fingerprint=self.fingerprint)
        if self.mismatch == "accept" and made.same_model(self.fingerprint):
            return pack
        rounds_differently = made.diff(self.fingerprint).keys() == {"passes"}
        if self.mismatch != "rebuild" and not rounds_differently:
            pack.check(self.fingerprint)
        reason = "another release or kind of processor" if rounds_differently else "another model"
        logger.warning("Pack %s was made by %s; its KV is computed anew from its text.", name, reason)
        return replace(pack, kv=None, token_ids=(), fingerprint=ModelFingerprint.unknown())


def checked_view(view: PackView, checked: CheckedSource) -> PackView:
    """`view`, with its packs checked."""
    return replace(view, source=checked)


def explicit_packs(
    packs: Sequence[KnowledgePack | str], view: PackView | None, checked: CheckedSource
) -> tuple[PackRef, ...]:
    """Packs that a caller named outright; a handle that does not resolve is an error here, not text."""
    references = []
    # The list of an agent's memory grows by one pack after the other, so each is a batch of its own.
    for number, pack in enumerate(packs, 1):
        if isinstance(pack, KnowledgePack):
            try:
                name = "pack:" + blake2b(pack.text.encode(), digest_size=8).hexdigest()
            except UnicodeEncodeError as error:
                raise PromptError("Got a pack of text that is not Unicode. Decode it with errors='replace'.") from error
            references.append(PackRef(name, checked.check(pack, name), batch=-number))
            continue
        handle = Handle.parse(pack)
        # The caller named it, no message did; so which roles are trusted does not matter.
        named = None if view is None else replace(checked_view(view, checked), trusted_roles={"system"})
        found = None if named is None else named.resolve(handle, "system")
        if found is None:
            raise PackNotFoundError(
                f"{handle} does not resolve. Pass `view=store.view({handle.namespace!r})` of the store that holds it."
            )
        references.append(PackRef(pack, found, batch=-number))
    return tuple(references)
